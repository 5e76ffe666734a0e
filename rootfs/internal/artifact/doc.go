// Package artifact puts finished files and folders into a cache, so that a reader sees each one whole or not.
//
// A file or folder is made under a temporary name next to its final one, written through to disk, and renamed. What a
// crash leaves behind therefore has a temporary name, is never taken for a result, and is removed by the next writer.
package artifact
