package debian

import (
	"fmt"
	"net/url"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"github.com/drowse-vm/drowse/rootfs/image"
	"github.com/drowse-vm/drowse/rootfs/internal/artifact"
)

// What a build takes from the host's apt: the origin of packages (mirrors), the keys that sign them (trust), and
// how to reach them (proxies, certificates, checks, credentials).

// aptSource is one repository of the host's apt sources: one URI and one suite.
type aptSource struct {
	uri        string
	suite      string
	components []string
	signedBy   string // Signed-By: a key file, or key material from a deb822 source
	options    []string
}

// maxSourceBytes bounds one file of apt sources.
const maxSourceBytes = 1 << 20

// readAptSources reads sources.list and the *.list and *.sources files of sources.list.d below the given apt
// configuration directory (normally /etc/apt), as sources.list(5) describes them. Disabled and source-code entries are
// left out.
func readAptSources(dir string) ([]aptSource, error) {
	files := []string{filepath.Join(dir, "sources.list")}
	entries, err := os.ReadDir(filepath.Join(dir, "sources.list.d"))
	if err != nil && !os.IsNotExist(err) {
		return nil, fmt.Errorf("read the host's apt sources: %w", err)
	}
	for _, e := range entries {
		if ext := filepath.Ext(e.Name()); ext == ".list" || ext == ".sources" {
			files = append(files, filepath.Join(dir, "sources.list.d", e.Name()))
		}
	}
	var out []aptSource
	for _, name := range files {
		b, err := artifact.ReadFile(name, maxSourceBytes)
		if os.IsNotExist(err) {
			continue
		}
		if err != nil {
			return nil, fmt.Errorf("read the host's apt sources: %w", err)
		}
		if strings.HasSuffix(name, ".sources") {
			out = append(out, parseDeb822Sources(string(b))...)
		} else {
			out = append(out, parseListSources(string(b))...)
		}
	}
	return out, nil
}

// parseListSources reads the one-line style: deb [ option=value ... ] URI SUITE COMPONENT...
func parseListSources(text string) []aptSource {
	var out []aptSource
	for line := range strings.Lines(text) {
		line, _, _ = strings.Cut(line, "#")
		line = strings.TrimSpace(line)
		rest, ok := strings.CutPrefix(line, "deb")
		if !ok || rest == "" || !strings.ContainsAny(rest[:1], " \t[") {
			continue
		}
		rest = strings.TrimSpace(rest)
		var s aptSource
		if opts, ok := strings.CutPrefix(rest, "["); ok {
			opts, rest, ok = strings.Cut(opts, "]")
			if !ok {
				continue
			}
			for _, o := range strings.Fields(opts) {
				if v, ok := strings.CutPrefix(strings.ToLower(o), "signed-by="); ok {
					s.signedBy = o[len(o)-len(v):]
				} else {
					s.options = append(s.options, o)
				}
			}
		}
		f := strings.Fields(rest)
		if len(f) < 2 {
			continue
		}
		s.uri, s.suite, s.components = f[0], f[1], f[2:]
		out = append(out, s)
	}
	return out
}

// parseDeb822Sources reads the stanzas of a .sources file.
func parseDeb822Sources(text string) []aptSource {
	var out []aptSource
	options := []string{"trusted", "check-valid-until", "check-date"}
	names := append([]string{"enabled", "types", "uris", "suites", "components", "signed-by"}, options...)
	for st := range artifact.Stanzas(text, names...) {
		if strings.EqualFold(st["enabled"], "no") || !slices.Contains(strings.Fields(st["types"]), "deb") {
			continue
		}
		var opts []string
		for _, k := range options {
			if v := st[k]; v != "" {
				opts = append(opts, k+"="+v)
			}
		}
		for _, u := range strings.Fields(st["uris"]) {
			for _, suite := range strings.Fields(st["suites"]) {
				out = append(out, aptSource{uri: u, suite: suite, components: strings.Fields(st["components"]),
					signedBy: st["signed-by"], options: opts})
			}
		}
	}
	return out
}

// suitesWithoutUpdates are the names of suites without -updates and -security.
var suitesWithoutUpdates = []string{"sid", "unstable", "experimental"}

// mirrorsFor returns those of the host's apt sources that serve a suite of Debian. hostSuite is the host's release
// from os-release, or empty.
//
// If the sources name the suite itself, mirrorsFor uses them with its -updates and -security suites. Otherwise it
// uses those of the host's own release, and replaces the release's name with the suite's. Only repositories with
// the component "main" count: Debian's archive has it, vendors that borrow the suite names have others.
func mirrorsFor(suite, hostSuite string, all []aptSource) []aptSource {
	pick := func(base string) []aptSource {
		var out []aptSource
		found := false
		for _, s := range all {
			kind, ok := suiteKind(s.suite, base)
			if !ok || !slices.Contains(s.components, "main") {
				continue
			}
			if kind != "" && slices.Contains(suitesWithoutUpdates, suite) {
				continue
			}
			found = found || kind == ""
			s.suite = suite + kind
			s.components = []string{"main"}
			out = append(out, s)
		}
		if !found {
			return nil
		}
		return out
	}
	if out := pick(suite); out != nil {
		return out
	}
	for _, base := range []string{hostSuite, "stable", "oldstable", "testing", "unstable", "sid"} {
		if base == "" {
			continue
		}
		if out := pick(base); out != nil {
			return out
		}
	}
	return nil
}

func suiteKind(s, base string) (kind string, ok bool) {
	rest, ok := strings.CutPrefix(s, base)
	return rest, ok && slices.Contains([]string{"", "-updates", "-security"}, rest)
}

// line returns the source in one-line style, which takes only key files: it writes key material to one below tmp.
func (s aptSource) line(tmp string, n int) (string, error) {
	opts := slices.Clone(s.options)
	if s.signedBy != "" {
		keyring := s.signedBy
		if strings.Contains(keyring, "\n") {
			keyring = filepath.Join(tmp, fmt.Sprintf("mirror-%d.asc", n))
			if err := os.WriteFile(keyring, []byte(deb822Text(s.signedBy)), 0o644); err != nil {
				return "", err
			}
		}
		opts = append(opts, "signed-by="+keyring)
	}
	head := "deb "
	if len(opts) > 0 {
		head += "[" + strings.Join(opts, " ") + "] "
	}
	return head + s.uri + " " + s.suite + " " + strings.Join(s.components, " "), nil
}

// deb822Text decodes the escape of empty lines (" .") in a multi-line field.
func deb822Text(v string) string {
	lines := strings.Split(strings.TrimSpace(v), "\n")
	for i, l := range lines {
		if l == "." {
			lines[i] = ""
		}
	}
	return strings.Join(lines, "\n") + "\n"
}

// withoutCredentials returns an apt URI without user and password.
func withoutCredentials(uri string) string {
	u, err := url.Parse(uri)
	if err != nil || u.User == nil {
		return uri
	}
	u.User = nil
	return u.String()
}

// ParseMirrors reads Options.Mirrors.
func ParseMirrors(mirrors []string, suite string) ([]aptSource, error) {
	var out []aptSource
	for _, m := range mirrors {
		s, err := parseMirror(m, suite)
		if err != nil {
			return nil, err
		}
		out = append(out, s)
	}
	return out, nil
}

// parseMirror reads one item of Options.Mirrors: a URL, or a line as in sources.list(5).
func parseMirror(m, suite string) (aptSource, error) {
	m = strings.TrimSpace(m)
	if strings.ContainsAny(m, "\n\r") {
		return aptSource{}, fmt.Errorf("%w: mirror %q has several lines", image.ErrInvalidOption, m)
	}
	if strings.HasPrefix(m, "deb ") || strings.HasPrefix(m, "deb[") {
		got := parseListSources(m)
		if len(got) != 1 {
			return aptSource{}, fmt.Errorf("%w: mirror %q is not a line of apt's sources.list", image.ErrInvalidOption, m)
		}
		return got[0], nil
	}
	u, err := url.Parse(m)
	if err != nil || u.Scheme == "" || strings.ContainsAny(m, " \t[]") {
		return aptSource{}, fmt.Errorf("%w: mirror %q is neither a URL nor a line of apt's sources.list", image.ErrInvalidOption, m)
	}
	return aptSource{uri: m, suite: suite, components: []string{"main"}}, nil
}

// aptConfPrefixes are the settings of the host's apt that a build uses (apt.conf(5), apt-transport-http(1),
// apt-transport-https(1)): how to reach the mirrors and how strict to be. It does not use hooks, pins and caching.
var aptConfPrefixes = []string{
	"acquire::http", "acquire::https", "acquire::ftp", "acquire::socks", "acquire::forceipv", "acquire::check-",
	"acquire::max-validtime", "acquire::min-validtime", "acquire::retries", "acquire::allow", "acquire::proxy",
	"acquire::queue-mode", "dir::etc::netrc",
}

// filterAptConf returns those settings in the output of "apt-config dump" that a build uses. It makes relative
// paths of credential files absolute: the build's apt has its configuration elsewhere.
func filterAptConf(dump, dir string) string {
	var b strings.Builder
	for line := range strings.Lines(dump) {
		line = strings.TrimSpace(line)
		key, value, ok := strings.Cut(line, ` "`)
		value = strings.TrimSuffix(value, `";`)
		lower := strings.ToLower(key)
		if !ok || value == "" || !slices.ContainsFunc(aptConfPrefixes, func(p string) bool { return strings.HasPrefix(lower, p) }) {
			continue
		}
		if strings.HasPrefix(lower, "dir::") && !filepath.IsAbs(value) {
			value = filepath.Join(dir, value)
		}
		b.WriteString(key + ` "` + value + "\";\n")
	}
	return b.String()
}
