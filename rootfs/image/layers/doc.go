// Package layers reads the layers of images, applies them to a tree, and writes them. Layers are tar streams, and none
// is trusted: every count, size and depth has a limit, links exist in the tree alone, and digests are checked.
//
// The layers of an image are read at the same time (layer.go), each into a list of entries and a spool of its own, and
// then applied to the tree in order (merge.go), by the OCI image specification.
package layers
