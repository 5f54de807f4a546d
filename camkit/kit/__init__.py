"""What several products share: statistics of samples, words, pages of HTML, fingerprints, and the store of rows."""
