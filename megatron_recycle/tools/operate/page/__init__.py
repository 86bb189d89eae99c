"""`--page`: the job in a browser. `state` is what a page shows, `server` serves it; the page itself is beside them."""
