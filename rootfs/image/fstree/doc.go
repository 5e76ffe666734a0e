// Package fstree is a root filesystem as a tree of inodes in memory, whose contents stay where they are: what every
// source of an image becomes, and what an image is written from.
package fstree
