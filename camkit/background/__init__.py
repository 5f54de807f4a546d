"""The background check: does a classifier need the object, or does it get by on what surrounds it?"""
