"""The run as a page of HTML: `html_page.render_page`."""
