// Package internal has no code of its own. Its folders are what drowse is built and
// tested with, and what its commands share: nothing that others may import.
package internal
