"""The analyzer as a page: data, server, export; the page itself is hand-written HTML, CSS and JavaScript."""
