// Package guesttest is for tests that have a host half and a guest half: it finds
// what they need (a kernel, an image with python3, the agent), gives each a store of
// its own that shares these, and lets the test binary be the process of a VM.
//
// What is needed is prepared by `make test`; $DROWSE_TEST_STATE names the directory. Without it such tests are skipped,
// but never when $CI is set.
package guesttest
