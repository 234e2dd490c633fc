"""The job's other ranks: compared and met through its store, never by a collective."""
