package debian

import (
	"errors"
	"os"
	"path/filepath"
	"reflect"
	"strings"
	"testing"

	"github.com/drowse-vm/drowse/rootfs/image"
	"github.com/drowse-vm/drowse/rootfs/image/imagetest"
)

const keyText = "-----BEGIN PGP PUBLIC KEY BLOCK-----\n.\nabc\n-----END PGP PUBLIC KEY BLOCK-----"

// sampleSources writes apt sources in both styles to a configuration directory.
func sampleSources(t *testing.T) string {
	t.Helper()
	dir := t.TempDir()
	imagetest.Write(t, filepath.Join(dir, "sources.list"), `
# deb http://off.example/debian bookworm main
deb-src http://src.example/debian bookworm main
deb [arch=amd64 Signed-By=/keys/One.gpg] http://user:secret@list.example/debian bookworm main contrib # said why
deb http://vendor.example/linux bookworm stable
broken
deb [signed-by=x
`)
	imagetest.Write(t, filepath.Join(dir, "sources.list.d/debian.sources"), `
Types: deb deb-src
# a comment within
URIs: http://a.example/debian http://b.example/debian
Suites: bookworm bookworm-updates
Components: main
Signed-By:
 -----BEGIN PGP PUBLIC KEY BLOCK-----
 .
 abc
 -----END PGP PUBLIC KEY BLOCK-----

Types: deb
URIs: http://sec.example/debian-security
Suites: bookworm-security
Components: main non-free
Trusted: yes

Enabled: no
Types: deb
URIs: http://off.example/debian
Suites: bookworm
Components: main
`)
	imagetest.Write(t, filepath.Join(dir, "sources.list.d/ignored.list.disabled"), "deb http://off.example/debian bookworm main\n")
	return dir
}

func TestApt_sources_of_both_styles_are_read(t *testing.T) {
	got, err := readAptSources(sampleSources(t))
	if err != nil {
		t.Fatal(err)
	}
	main := []string{"main"}
	want := []aptSource{
		{uri: "http://user:secret@list.example/debian", suite: "bookworm", components: []string{"main", "contrib"},
			signedBy: "/keys/One.gpg", options: []string{"arch=amd64"}},
		{uri: "http://vendor.example/linux", suite: "bookworm", components: []string{"stable"}},
		{uri: "http://a.example/debian", suite: "bookworm", components: main, signedBy: keyText},
		{uri: "http://a.example/debian", suite: "bookworm-updates", components: main, signedBy: keyText},
		{uri: "http://b.example/debian", suite: "bookworm", components: main, signedBy: keyText},
		{uri: "http://b.example/debian", suite: "bookworm-updates", components: main, signedBy: keyText},
		{uri: "http://sec.example/debian-security", suite: "bookworm-security", components: []string{"main", "non-free"},
			options: []string{"trusted=yes"}},
	}
	if !reflect.DeepEqual(got, want) {
		t.Errorf("got  %+v\nwant %+v", got, want)
	}
}

func TestMirrors_are_those_that_serve_the_suite(t *testing.T) {
	all, err := readAptSources(sampleSources(t))
	if err != nil {
		t.Fatal(err)
	}
	for _, c := range []struct {
		suite, host string
		want        string
	}{
		{"bookworm", "bookworm", "list bookworm; a bookworm; a bookworm-updates; b bookworm; b bookworm-updates; sec bookworm-security"},
		{"trixie", "bookworm", "list trixie; a trixie; a trixie-updates; b trixie; b trixie-updates; sec trixie-security"},
		{"sid", "bookworm", "list sid; a sid; b sid"},
		{"trixie", "", ""},
		{"trixie", "noble", ""},
	} {
		var got []string
		for _, s := range mirrorsFor(c.suite, c.host, all) {
			_, host, _ := strings.Cut(strings.TrimPrefix(s.uri, "http://"), "@")
			if host == "" {
				host = strings.TrimPrefix(s.uri, "http://")
			}
			host, _, _ = strings.Cut(host, ".")
			got = append(got, host+" "+s.suite)
			if !reflect.DeepEqual(s.components, []string{"main"}) {
				t.Errorf("%s has components %v, want main", s.uri, s.components)
			}
		}
		if g := strings.Join(got, "; "); g != c.want {
			t.Errorf("%s on a %q host: got %q, want %q", c.suite, c.host, g, c.want)
		}
	}
}

func TestSource_line_writes_key_material_to_a_file(t *testing.T) {
	tmp := t.TempDir()
	s := aptSource{uri: "http://a.example/debian", suite: "bookworm", components: []string{"main"}, signedBy: keyText, options: []string{"trusted=no"}}
	got, err := s.line(tmp, 3)
	key := filepath.Join(tmp, "mirror-3.asc")
	if want := "deb [trusted=no signed-by=" + key + "] http://a.example/debian bookworm main"; err != nil || got != want {
		t.Errorf("got %q (%v), want %q", got, err, want)
	}
	b, err := os.ReadFile(key)
	if want := strings.Replace(keyText, "\n.\n", "\n\n", 1) + "\n"; err != nil || string(b) != want {
		t.Errorf("key file holds %q (%v), want %q", b, err, want)
	}
}

func TestParseMirror(t *testing.T) {
	for in, want := range map[string]aptSource{
		"http://m.example/debian": {uri: "http://m.example/debian", suite: "sid", components: []string{"main"}},
		"deb [trusted=yes] file:/srv/repo ./ x": {uri: "file:/srv/repo", suite: "./", components: []string{"x"},
			options: []string{"trusted=yes"}},
	} {
		if got, err := parseMirror(in, "sid"); err != nil || !reflect.DeepEqual(got, want) {
			t.Errorf("%q: got %+v (%v), want %+v", in, got, err, want)
		}
	}
	for _, in := range []string{"", "m.example/debian", "http://m.example/debian sid", "deb http://x", "http://a/\ndeb http://b/ c d"} {
		if got, err := parseMirror(in, "sid"); !errors.Is(err, image.ErrInvalidOption) {
			t.Errorf("%q: got %+v (%v), want ErrInvalidOption", in, got, err)
		}
	}
}

func TestCredentials_are_cut_from_URIs(t *testing.T) {
	for in, want := range map[string]string{
		"https://user:secret@m.example/debian": "https://m.example/debian",
		"http://m.example/debian":              "http://m.example/debian",
		"file:/srv/repo":                       "file:/srv/repo",
	} {
		if got := withoutCredentials(in); got != want {
			t.Errorf("%q: got %q, want %q", in, got, want)
		}
	}
}

func TestApt_conf_of_the_host_is_filtered(t *testing.T) {
	dump := `APT "";
Acquire "";
Acquire::http "";
Acquire::http::Proxy "http://proxy.example:3128";
acquire::HTTPS::m.example::CaInfo "/ca.pem";
Acquire::Check-Valid-Until "false";
Acquire::Languages:: "none";
Acquire::GzipIndexes "true";
DPkg::Post-Invoke:: "rm -rf /";
Dir::Etc::netrc "/etc/apt/auth.conf";
Dir::Etc::netrcparts "auth.conf.d";
Acquire::Retries "3";
`
	want := `Acquire::http::Proxy "http://proxy.example:3128";
acquire::HTTPS::m.example::CaInfo "/ca.pem";
Acquire::Check-Valid-Until "false";
Dir::Etc::netrc "/etc/apt/auth.conf";
Dir::Etc::netrcparts "/etc/apt/auth.conf.d";
Acquire::Retries "3";
`
	if got := filterAptConf(dump, "/etc/apt"); got != want {
		t.Errorf("got %q\nwant %q", got, want)
	}
}

func TestHostSuite(t *testing.T) {
	for in, want := range map[string]string{
		"ID=debian\nVERSION_CODENAME=bookworm\n":      "bookworm",
		"ID=\"debian\"\nVERSION_CODENAME='trixie'\n":  "trixie",
		"ID=ubuntu\nVERSION_CODENAME=noble\n":         "",
		"PRETTY_NAME=\"Debian GNU/Linux\"\nID=debian": "",
		"": "",
	} {
		if got := hostSuite(in); got != want {
			t.Errorf("%q: got %q, want %q", in, got, want)
		}
	}
}
