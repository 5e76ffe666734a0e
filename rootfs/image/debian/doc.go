// Package debian makes the root filesystem of a Debian release with the host's mmdebstrap, mirrors and keys.
package debian
