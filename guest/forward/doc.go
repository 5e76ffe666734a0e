// Package forward carries connections between sockets of the host and sockets in a guest, in either direction, like
// ssh's -L and -R.
package forward
