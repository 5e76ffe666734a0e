// Package osfile does with files and Unix sockets what drowse does in many places, each thing in one way.
package osfile
