// Package erofs writes a tree as an EROFS image, with the same bytes for the same tree, and reads an image as a tree.
//
// go-erofs lays the image out; this package adds hard links, the UUID and the checksum of the superblock.
package erofs
