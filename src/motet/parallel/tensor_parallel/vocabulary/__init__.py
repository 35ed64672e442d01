"""Tables and heads whose entries of a vocabulary are split over ranks: the proof, and the work of a rank."""
