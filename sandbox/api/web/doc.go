// Package web is the page of `drowse serve`: sandboxes, their lineage, snapshots, history, flows and console, for
// people.
//
// It is static: HTML, CSS and ES modules as they were written, embedded, with nothing from elsewhere. What it shows and
// does goes through the HTTP API of the same origin, with the same tokens: the page has no rights of its own. Texts
// that guests, files and users have chosen become text nodes, with all that cannot be seen in them written out
// (static/dom.js, static/format.js), and the Content-Security-Policy has the browser refuse markup that is made of
// text.
//
// Package browsertest has it opened by a real browser: `make test-browser`.
package web
