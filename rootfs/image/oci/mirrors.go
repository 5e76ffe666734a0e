package oci

import (
	"encoding/json"
	"io"
	"net/url"
	"os"
	"strings"

	"github.com/google/go-containerregistry/pkg/name"
)

// dockerConfig is the configuration of docker's daemon, and maxDockerConfig what is read of it, in bytes.
var dockerConfig = "/etc/docker/daemon.json"

const maxDockerConfig = 1 << 20

// mirror is a reference at a mirror of docker.io.
type mirror struct {
	ref       string
	plainHTTP bool
}

// mirrors returns where docker would look for an image of docker.io before it asks docker.io. A configuration that
// is missing or cannot be read names none.
func mirrors(ref string) (out []mirror) {
	r, err := parseReference(ref, false)
	if err != nil || r.Context().RegistryStr() != name.DefaultRegistry {
		return nil
	}
	f, err := os.Open(dockerConfig)
	if err != nil {
		return nil
	}
	defer func() { _ = f.Close() }() // only read
	var c struct {
		Mirrors []string `json:"registry-mirrors"`
	}
	if json.NewDecoder(io.LimitReader(f, maxDockerConfig)).Decode(&c) != nil {
		return nil
	}
	sep := ":"
	if _, ok := r.(name.Digest); ok {
		sep = "@"
	}
	for _, m := range c.Mirrors {
		u, err := url.Parse(m)
		if err != nil || u.Host == "" || strings.Trim(u.Path, "/") != "" {
			continue
		}
		out = append(out, mirror{u.Host + "/" + r.Context().RepositoryStr() + sep + r.Identifier(), u.Scheme == "http"})
	}
	return out
}
