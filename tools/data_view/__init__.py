"""What tools/show_data.py shows: samples as pieces of text, counts, and the page."""
