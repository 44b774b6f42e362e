"""From prompts to videos, records and reports: what the commands and the page share."""
