"""Views of one numeric diff report: JSON, terminal, Markdown, HTML, and the difference of two reports."""
