package oci

import (
	"os"
	"path/filepath"
	"slices"
	"testing"
)

func TestMirrors_of_docker_are_asked_for_images_of_docker_io_alone(t *testing.T) {
	was := dockerConfig
	defer func() { dockerConfig = was }()
	dockerConfig = filepath.Join(t.TempDir(), "daemon.json")
	if got := mirrors("python"); got != nil {
		t.Errorf("without a configuration: %v", got)
	}
	text := `{"registry-mirrors": ["https://mirror.example/", "http://10.0.0.1:5000", "https://x.example/path", ":"], "debug": true}`
	if err := os.WriteFile(dockerConfig, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	const digest = "sha256:0123456789abcdef0123456789abcdef0123456789abcdef0123456789abcdef"
	for ref, want := range map[string][]mirror{
		"python:3.12":              {{"mirror.example/library/python:3.12", false}, {"10.0.0.1:5000/library/python:3.12", true}},
		"docker.io/me/app":         {{"mirror.example/me/app:latest", false}, {"10.0.0.1:5000/me/app:latest", true}},
		"python@" + digest:         {{"mirror.example/library/python@" + digest, false}, {"10.0.0.1:5000/library/python@" + digest, true}},
		"ghcr.io/me/app:v1":        nil,
		"not a reference":          nil,
		"localhost:5000/app:v1":    nil,
		"registry.example/me/app:": nil,
	} {
		if got := mirrors(ref); !slices.Equal(got, want) {
			t.Errorf("%s: %v, want %v", ref, got, want)
		}
	}
	if err := os.WriteFile(dockerConfig, []byte("{"), 0o600); err != nil {
		t.Fatal(err)
	}
	if got := mirrors("python"); got != nil {
		t.Errorf("with a broken configuration: %v", got)
	}
}
