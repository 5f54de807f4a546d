"""What several products share: the statistics of samples, numbers and lists in words, and pages of HTML."""
