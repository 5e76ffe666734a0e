// Package erofs writes a tree as an EROFS image, the same bytes for the same tree, and makes a tree of an image.
//
// go-erofs lays the image out; this package adds hard links, the UUID and the checksum of the superblock.
package erofs
