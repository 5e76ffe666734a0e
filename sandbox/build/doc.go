// Package build makes images from the steps of a build file. Commands run in a VM of package sandbox, and what
// they write becomes a layer of the image. Files of the context become layers without a VM.
package build
