"""Many pictures: folders of files, explained and written as a stream."""
