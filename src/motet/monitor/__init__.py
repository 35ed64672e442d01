"""What a run tells about itself: events, spans, and the sinks that show them."""
