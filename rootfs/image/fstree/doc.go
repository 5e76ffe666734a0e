// Package fstree is a root filesystem as a tree of inodes in memory, whose contents stay in place. Every source of an
// image becomes such a tree, and an image is written from it.
package fstree
