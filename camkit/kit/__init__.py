"""What several products share: the statistics of samples."""
