// Package browsertest has tests of the page in a real browser, before the real API on VMs in memory: `make
// test-browser`.
//
// They have the build tag browser, since they need a Chromium, which is more to install than `make test` has time for.
package browsertest
