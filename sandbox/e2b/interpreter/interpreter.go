// Package interpreter has the recipe of the image that E2B's code interpreter SDK runs code in: Debian's ipykernel, and
// a server of that wire, interpreter.py, on port 49999 of the guest's loopback.
package interpreter

import (
	"embed"
	"os"
	"path/filepath"
	"time"
)

const (
	// Tag is the name of the recipe, and the default tag of the image.
	Tag = "code-interpreter"
	// BuildFile is the name of the file with the steps.
	BuildFile = "Drowsefile"
	// Packages are the Debian packages of the base image. The server needs the first three. The others are for users
	// and their code.
	Packages = "python3-ipykernel,python3-jupyter-client,python3-tornado,python3-numpy,python3-pandas,python3-matplotlib,bash,ca-certificates,curl,git,passwd"
)

//go:embed Drowsefile interpreter.py
var files embed.FS

// Write writes the build file and its context into a directory that is empty. The same files give the same image.
func Write(dir string) error {
	if err := os.CopyFS(dir, files); err != nil {
		return err
	}
	names, err := files.ReadDir(".")
	for _, e := range names {
		if err := os.Chtimes(filepath.Join(dir, e.Name()), time.Time{}, time.Unix(0, 0)); err != nil {
			return err
		}
	}
	return err
}
