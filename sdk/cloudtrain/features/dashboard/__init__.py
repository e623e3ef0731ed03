"""The web page of runs: live in a browser, and exported as one HTML file."""
