// Package web is the page of `drowse serve`, for people: it makes sandboxes, and shows them with their terminals,
// files, policies, lineage, snapshots, history, flows and consoles, images, templates and the host.
//
// It is static: HTML, CSS and ES modules in source form, embedded, with nothing from other hosts. It uses the HTTP
// API of the same origin, with the same tokens: the page has no rights of its own. Texts that guests, files and
// users chose become text nodes, and invisible characters in them are written out (static/dom.js,
// static/format.js). The Content-Security-Policy makes the browser refuse markup made from text.
//
// static/vendor is xterm.js, unchanged: scripts/vendor-xterm fetches it, and vendor.sum has its sums.
//
// Package browsertest opens it in a real browser: `make test-browser`.
package web
