// Package layers reads the layers of images, puts them on each other, and writes them. Layers are tar streams, and none
// is trusted: every count, size and depth has a bound, links exist in the tree alone, and digests are checked.
//
// The layers of an image are read at the same time (layer.go), each into a list of entries and a spool of its own, and
// then put on the tree one after the other (merge.go), by the OCI image specification.
package layers
