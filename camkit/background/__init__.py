"""The background check: does a classifier need the object, or is the background enough for it?"""
