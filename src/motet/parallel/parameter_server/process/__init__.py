"""The processes of a parameter server: coordinator, servers, worker connections and their transport."""
