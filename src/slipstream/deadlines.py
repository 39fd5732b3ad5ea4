"""Deadlines in seconds that several roles keep, so that no one gives up while another is still within its own time."""

LOAD_S = 900.0  # a role reads, fetches or converts its model and proves it
START_S = 120.0  # until a role's own code runs: interpreter and imports
SUCCESSOR_S = START_S + LOAD_S + 60.0  # no engine is in service: until one is
WRITE_CHECKPOINT_S = 600.0  # the trainer writes a checkpoint's files
COMMIT_CHECKPOINT_S = 1800.0  # the controller hashes every one of them
CHECKPOINT_S = WRITE_CHECKPOINT_S + COMMIT_CHECKPOINT_S  # both, as the trainer sees it
WEIGHTS_S = 120.0  # the two ends of a group that carries weights find each other, or a bucket moves from one to the other
