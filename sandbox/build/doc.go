// Package build makes images of the steps of a build file. Its commands run in a VM of package sandbox, and what they
// write becomes a layer of the image; files of the context become layers without one.
package build
