//go:build linux

package main

import (
	"github.com/drowse-vm/drowse/sandbox/api"
	"github.com/drowse-vm/drowse/sandbox/api/web"
)

// pageMounts returns the mounts of the browser page. The page has no secrets, and asks for a token itself.
func pageMounts() ([]api.Mount, error) {
	page, err := web.Handler()
	if err != nil {
		return nil, err
	}
	return []api.Mount{{Pattern: "GET /{$}", Handler: page}, {Pattern: "GET " + web.Prefix, Handler: page}}, nil
}
