"""`--page`: the job in a browser. `state` is the page's content, `server` serves it; the page itself is beside them."""
