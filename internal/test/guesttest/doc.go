// Package guesttest is for tests with a host half and a guest half. It finds what they need (a kernel, an image
// with python3, the agent), gives each its own store that shares these, and lets the test binary be the process of
// a VM.
//
// `make test` prepares these; $DROWSE_TEST_STATE names their directory. Without it such tests are skipped, unless
// $CI is set.
package guesttest
