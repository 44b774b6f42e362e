"""Rows of measurements in files, and the pages and tables made from them."""
