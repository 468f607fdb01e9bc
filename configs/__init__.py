"""One file for each setup; every default lives here and none in the code."""
