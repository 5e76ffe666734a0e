// Package forward carries connections between sockets of the host and sockets in a guest,
// in either direction, in the way of ssh's -L and -R.
package forward
