//go:build e2bnode

package e2btest

import (
	"bufio"
	"bytes"
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/drowse-vm/drowse/sandbox/e2b/interpreter"
)

// sdks are the packages of node/package.json, by their versions. The oldest knows no E2B_SANDBOX_URL: it finds
// sandboxes by host names and TLS.
var sdks = []struct {
	pkg, version string
	byHost       bool
}{{"e2b", "2.51.0", false}, {"e2b-2.38", "2.38.3", false}, {"e2b-2.6", "2.6.4", true}}

// row is the result of a group of cases.
type row struct{ passed, failed, skipped int }

func TestNode_the_unmodified_package_e2b(t *testing.T) {
	if _, err := os.Stat("node/node_modules/e2b"); err != nil {
		t.Fatal("its npm packages are not installed: make test-e2b")
	}
	g := newGuests(t)
	server := interpreterSource(t)
	var order []string // of groups: those of the newest package, which comes first
	matrix := map[string]map[string]row{}
	for _, sdk := range sdks {
		matrix[sdk.version] = map[string]row{}
	}
	// They wait for more than they compute.
	t.Cleanup(func() {
		table := report(order, matrix)
		fmt.Print(table)
		if doc, err := os.ReadFile("../../../docs/guides/e2b.md"); os.Getenv("E2B_ONLY") == "" && server != "" && (err != nil || !strings.Contains(string(doc), table)) {
			t.Errorf("docs/guides/e2b.md has another table: %v", err)
		}
	})
	for i, sdk := range sdks {
		rows := matrix[sdk.version]
		t.Run(sdk.version, func(t *testing.T) {
			t.Parallel()
			w := beginWith(t, g, sdk.byHost, nil)
			cmd := exec.CommandContext(t.Context(), "node", "--import", "./lookup.mjs", "run.mjs", sdk.pkg, os.Getenv("E2B_ONLY"))
			cmd.Dir = "node"
			cmd.Env = append(os.Environ(), "E2B_API_KEY="+w.key, "E2B_API_URL="+w.url, "E2B_DOMAIN="+domain+":"+w.port, "DROWSE_DOMAIN="+domain, "NODE_EXTRA_CA_CERTS="+w.ca, "DROWSE_INTERPRETER="+server)
			if !sdk.byHost {
				cmd.Env = append(cmd.Env, "E2B_SANDBOX_URL="+w.url)
			}
			cmd.Stderr = os.Stderr
			out, err := cmd.Output()
			if err != nil {
				t.Fatalf("node: %v", err)
			}
			for lines := bufio.NewScanner(bytes.NewReader(out)); lines.Scan(); {
				var c struct {
					Group, Name, Failed string
					Ms                  int
					Passed, Skipped     bool
				}
				if err := json.Unmarshal(lines.Bytes(), &c); err != nil {
					t.Errorf("%s: %v", lines.Text(), err)
					continue
				}
				t.Logf("%6d ms %s: %s", c.Ms, c.Group, c.Name)
				r, known := rows[c.Group]
				if !known && i == 0 {
					order = append(order, c.Group)
				}
				switch {
				case c.Passed:
					r.passed++
				case c.Skipped:
					r.skipped++
				default:
					r.failed++
					t.Errorf("%s: %s: %s", c.Group, c.Name, c.Failed)
				}
				rows[c.Group] = r
			}
			if len(rows) == 0 {
				t.Error("no case ran")
			}
		})
	}
}

// TestServer_stands_for_a_command has a shell's command use a server, as a test suite of others would.
func TestServer_stands_for_a_command(t *testing.T) {
	command := os.Getenv("E2B_COMMAND")
	if command == "" {
		t.Skip("there is no command: make e2b-for E2B_COMMAND=COMMAND")
	}
	lookup, err := filepath.Abs("node/lookup.mjs")
	if err != nil {
		t.Fatal(err)
	}
	w := beginWith(t, newGuests(t), true, nil)
	cmd := exec.CommandContext(t.Context(), "/bin/bash", "-c", command)
	cmd.Env = append(os.Environ(), "E2B_API_KEY="+w.key, "E2B_API_URL="+w.url, "E2B_DOMAIN="+domain+":"+w.port, "DROWSE_DOMAIN="+domain,
		"NODE_EXTRA_CA_CERTS="+w.ca, "NODE_OPTIONS=--import="+lookup)
	cmd.Stdout, cmd.Stderr = os.Stdout, os.Stderr
	if err := cmd.Run(); err != nil {
		t.Error(err)
	}
}

// interpreterSource returns the kernel server of the image code-interpreter, or "" where its packages are missing.
func interpreterSource(t *testing.T) string {
	if out, err := exec.CommandContext(t.Context(), "/usr/bin/python3", "-c", "import ipykernel, jupyter_client, tornado").CombinedOutput(); err != nil {
		fmt.Fprintf(os.Stderr, "code interpreter is skipped, and the table not compared: no Debian package python3-ipykernel (scripts/deps interpreter): %v %s\n", err, out)
		return ""
	}
	dir := t.TempDir()
	if err := interpreter.Write(dir); err != nil {
		t.Fatal(err)
	}
	source, err := os.ReadFile(filepath.Join(dir, "interpreter.py"))
	if err != nil {
		t.Fatal(err)
	}
	return string(source)
}

// report returns the matrix of groups and packages.
func report(order []string, matrix map[string]map[string]row) string {
	var b strings.Builder
	fmt.Fprintf(&b, "| passed/failed/skipped |")
	for _, sdk := range sdks {
		fmt.Fprintf(&b, " e2b %s |", sdk.version)
	}
	fmt.Fprintf(&b, "\n|---|%s\n", strings.Repeat("---|", len(sdks)))
	for _, group := range order {
		fmt.Fprintf(&b, "| %s |", group)
		for _, sdk := range sdks {
			r := matrix[sdk.version][group]
			fmt.Fprintf(&b, " %d/%d/%d |", r.passed, r.failed, r.skipped)
		}
		fmt.Fprintln(&b)
	}
	return b.String()
}
