package archtest

import (
	"fmt"
	"go/ast"
	"go/parser"
	"go/token"
	"io/fs"
	"os"
	"os/exec"
	"path"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"
)

const module = "github.com/drowse-vm/drowse"

// A rule says what a package may import of this module. Every package may import the packages below its own
// directory. "x/..." is x and everything below it.
type rule struct {
	of  string
	may []string
}

// forAll is what every package may import.
var forAll = []string{lazyregexp, "internal/wait"}

const lazyregexp = "internal/lazyregexp"

// The first of the rules whose "of" matches a package applies. A package that matches no rule may import nothing
// of this module.
//
// cmd -> sandbox -> {vmm, snapshot, netpolicy, rootfs, guest}; vmm -> {devices, snapshot/pager}; devices -> {devices,
// devices/virtq} -> vmm/guestmem; snapshot -> vmm/guestmem. netpolicy, rootfs and guest know nothing of VMs.
var rules = []rule{
	{"cmd/drowse-agent", []string{"guest/..."}},
	{"cmd/drowse-vmm", []string{"sandbox/process"}},
	{"cmd/drowse-peer-guest", nil},
	{"cmd/...", []string{"sandbox/...", "bench/...", "netpolicy/...", "rootfs/...", "guest", "guest/audit", "guest/forward", "guest/sshd", "internal/osfile", "internal/doctor", "guest/report"}},

	// Examples import what programs elsewhere import.
	{"examples/...", []string{"sandbox/...", "netpolicy", "netpolicy/link", "guest"}},
	{"sdk/...", []string{"sandbox/...", "guest/fakeguest", "netpolicy"}},
	// The controller of a module of its own is a client of nodes, and links no VMM.
	{"kubernetes/...", []string{"kubernetes/agents", "kubernetes/controller", "netpolicy", "sandbox/api/client", "sandbox/records", "sandbox/spec"}},
	{"bench/...", []string{"sandbox/...", "vmm/...", "devices/...", "snapshot/...", "netpolicy/...", "rootfs/...", "guest", "internal/osfile"}},
	{"sandbox/supervisor", []string{"sandbox", "sandbox/state", "sandbox/template", "sandbox/control", "sandbox/pool", "sandbox/spec", "sandbox/fleet", "sandbox/events", "netpolicy", "netpolicy/link", "netpolicy/hostnet", "netpolicy/refmodel"}},
	// The lifecycle builds upon VMs. Records and lifetimes know nothing of VMs.
	{"sandbox/fleet/...", []string{"sandbox", "sandbox/state", "sandbox/control", "sandbox/pool", "sandbox/spec", "sandbox/fleet", "sandbox/records", "sandbox/lifetime", "sandbox/events", "snapshot", "guest/audit"}},
	{"sandbox/records", []string{"sandbox/lifetime", "sandbox/spec"}},
	{"sandbox/metrics", []string{"sandbox", "sandbox/state", "sandbox/control", "sandbox/pool", "sandbox/spec", "sandbox/fleet/...", "sandbox/records", "sandbox/supervisor", "netpolicy/..."}},
	// Embedders make spans with their own provider. Only the package that sets one up from the environment imports
	// the SDK.
	{"sandbox/traces/otlp", nil},
	{"sandbox/traces", []string{"sandbox", "sandbox/state", "sandbox/control", "sandbox/pool", "sandbox/spec", "sandbox/fleet/...", "sandbox/events", "guest"}},
	// The API leads to a host. Its client shares the wire format with it.
	{"sandbox/api/wire", []string{"sandbox/spec", "sandbox/records", "sandbox/lifetime", "netpolicy", "guest/report"}},
	{"sandbox/api/client", []string{"sandbox/spec", "sandbox/api/wire", "sandbox/records", "netpolicy"}},
	// The page is files. Its tests serve it with an API.
	{"sandbox/api/web/browsertest", []string{"sandbox", "sandbox/state", "sandbox/control", "sandbox/pool", "sandbox/spec", "sandbox/api/...", "sandbox/fleet/...", "sandbox/records", "netpolicy", "rootfs/image", "guest"}},
	{"sandbox/api/web", nil},
	// Tokens are also those of other listeners.
	{"sandbox/api/tokens", []string{"internal/osfile"}},
	{"sandbox/api/identity", []string{"sandbox/api/tokens"}},
	{"sandbox/api", []string{"sandbox", "sandbox/cluster/peer", "sandbox/state", "sandbox/control", "sandbox/pool", "sandbox/sources", "sandbox/spec", "sandbox/template", "sandbox/fleet/...", "sandbox/records", "sandbox/lifetime", "sandbox/events", "sandbox/build", "netpolicy", "rootfs/image/...", "rootfs/volume", "guest", "guest/audit", "internal/osfile", "guest/report"}},
	// What carries connections from outside knows sandboxes, and no VM.
	{"sandbox/gateway", []string{"sandbox", "sandbox/cluster/peer", "sandbox/state", "sandbox/spec", "sandbox/events", "sandbox/fleet", "guest", "guest/agentpb"}},
	// A language model's tools are verbs of sandboxes.
	{"sandbox/mcp", []string{"sandbox", "sandbox/state", "sandbox/spec", "sandbox/fleet", "sandbox/records", "netpolicy", "rootfs/image", "guest"}},
	// What clients of E2B know ends at the host. It shares the tokens of the API.
	{"sandbox/e2b/e2bpb/...", nil},
	{"sandbox/e2b/interpreter", nil},
	{"sandbox/e2b/accounts", []string{"guest"}},
	{"sandbox/e2b/series", nil},
	{"sandbox/e2b/bodies", nil},
	{"sandbox/e2b/answers", nil},
	{"sandbox/e2b/templates", []string{"sandbox", "sandbox/e2b/accounts", "sandbox/e2b/answers", "sandbox/e2b/bodies", "sandbox/api/tokens", "sandbox/spec", "sandbox/lifetime", "rootfs/image", "guest"}},
	{"sandbox/e2b/e2btest", []string{"sandbox", "sandbox/api", "sandbox/api/tokens", "sandbox/api/wire", "sandbox/e2b/...", "sandbox/pool", "sandbox/sandboxtest", "sandbox/spec", "sandbox/state", "sandbox/supervisor", "rootfs/image", "guest", "guest/agent", "guest/agentpb"}},
	{"sandbox/e2b", []string{"sandbox", "sandbox/e2b/accounts", "sandbox/e2b/bodies", "sandbox/e2b/series", "sandbox/e2b/answers", "sandbox/e2b/templates", "sandbox/cluster/peer", "sandbox/api/identity", "sandbox/api/tokens", "sandbox/gateway", "sandbox/state", "sandbox/spec", "sandbox/fleet", "sandbox/lifetime", "netpolicy", "rootfs/image", "guest", "guest/audit"}},
	{"sandbox/lifetime", nil},
	// Where secrets come from, which only the host knows.
	{"sandbox/sources", []string{"sandbox/spec", "internal/osfile"}},
	{"sandbox/build", []string{"sandbox", "sandbox/state", "sandbox/control", "sandbox/pool", "sandbox/spec", "rootfs/image/...", "guest", "internal/osfile"}},
	// The description of a VM, also for clients on other systems.
	{"sandbox/spec", []string{"netpolicy", "guest/agentpb", "guest/report", "sandbox/lifetime"}},
	// A single VM in this process.
	{"sandbox/instance", []string{"sandbox/spec", "vmm/...", "devices/...", "snapshot", "snapshot/freepages", "snapshot/pagecache", "snapshot/pager", "netpolicy", "rootfs/...", "guest", "internal/osfile"}},
	// The host's end of its link. It knows no VM: the two meet in the TAP device.
	{"sandbox/network", []string{"sandbox/spec", "sandbox/jail/confine", "sandbox/jail/rpc", "devices/net", "devices/net/tap", "netpolicy", "netpolicy/link", "netpolicy/flow", "netpolicy/resolver", "netpolicy/tlsname", "netpolicy/proxy", "netpolicy/hostnet"}},
	// VMs in memory, which replace the VM below the process.
	{"sandbox/sandboxtest", []string{"sandbox", "sandbox/state", "sandbox/control", "sandbox/pool", "sandbox/spec", "sandbox/process", "sandbox/instance", "sandbox/network", "vmm", "vmm/guestmem", "devices/net", "devices/secrets", "devices/vsock", "snapshot", "snapshot/pager", "netpolicy", "rootfs/disk", "rootfs/image", "rootfs/image/fstree", "rootfs/kernel", "guest", "guest/agentpb", "guest/fakeguest"}},
	// The process of a VM, its launcher, and the protocol between the two.
	{"sandbox/procstat", nil},
	{"sandbox/process", []string{"sandbox/control", "sandbox/jail", "sandbox/jail/confine", "sandbox/procstat", "sandbox/limits", "sandbox/arrival", "sandbox/instance", "sandbox/lease", "sandbox/network", "sandbox/spec", "sandbox/state/...", "sandbox/lifetime", "sandbox/events", "sandbox/hosthooks", "vmm/...", "devices/net", "devices/secrets", "devices/vsock", "snapshot", "snapshot/pager", "netpolicy", "netpolicy/hostnet", "netpolicy/proxy", "rootfs/...", "guest", "guest/audit", "internal/osfile", "guest/report"}},
	{"sandbox/pool", []string{"sandbox/control", "sandbox/instance", "sandbox/spec", "sandbox/state/...", "sandbox/events", "netpolicy/hostnet", "netpolicy/proxy", "rootfs/image", "guest", "internal/osfile"}},
	{"sandbox/control", []string{"sandbox/spec", "sandbox/state/...", "sandbox/lifetime", "sandbox/events", "vmm", "vmm/kvm", "vmm/boot", "snapshot", "netpolicy", "netpolicy/link", "netpolicy/hostnet", "netpolicy/proxy", "rootfs/...", "guest"}},
	{"sandbox/template", []string{"sandbox/spec", "internal/osfile"}},
	{"sandbox/state/...", []string{"sandbox/state", "sandbox/lease", "sandbox/template", "sandbox/limits", "sandbox/jail/confine", "sandbox/spec", "sandbox/instance", "sandbox/lifetime", "sandbox/events", "sandbox/hosthooks", "vmm", "vmm/guestmem", "snapshot", "snapshot/pagecache", "netpolicy", "netpolicy/link", "netpolicy/hostnet", "netpolicy/proxy", "rootfs/...", "guest", "guest/audit", "internal/osfile", "guest/report"}},
	{"sandbox/limits", []string{"sandbox/spec", "sandbox/lifetime", "vmm", "internal/osfile"}},
	// A hostile guest may hold the other end.
	{"sandbox/jail/rpc", nil},
	// Confinement knows no VMs.
	{"sandbox/jail/confine", []string{"internal/osfile"}},
	// One VM in a confined process, and the process. control: errors keep their identity on the way.
	{"sandbox/jail", []string{"sandbox/jail/...", "sandbox/instance", "sandbox/spec", "sandbox/control", "vmm", "devices/net/tap", "devices/secrets", "snapshot", "snapshot/pager", "snapshot/pagecache", "rootfs/disk", "rootfs/volume", "guest", "internal/osfile"}},
	{"sandbox/events", []string{"internal/osfile"}},
	// Stores that hosts share know nothing of what is in them.
	{"sandbox/archive", []string{"sandbox/blob", "sandbox/state", "snapshot", "rootfs/disk", "rootfs/image", "rootfs/image/sparse", "internal/osfile"}},
	{"sandbox/blob", []string{"internal/osfile"}},
	{"sandbox/blob/...", []string{"sandbox/blob", "sandbox/blob/blobtest"}},
	{"sandbox/archive/ledger", []string{"sandbox/blob"}},
	// A host's part among others that share sandboxes. The process of a VM only knows the lease.
	// What hosts say to each other knows no sandboxes, only who asks and whom to ask.
	{"sandbox/cluster/peer", []string{"sandbox/spec"}},
	{"sandbox/cluster", []string{"sandbox", "sandbox/archive/...", "sandbox/arrival", "sandbox/blob", "sandbox/control", "sandbox/lease", "sandbox/lifetime", "sandbox/spec", "sandbox/state", "snapshot", "internal/osfile"}},
	{"sandbox/lease", []string{"sandbox/spec", "internal/osfile"}},
	{"sandbox/arrival", []string{"internal/osfile"}},
	{"sandbox/hosthooks", []string{"sandbox/events", "sandbox/spec", "guest/report"}},
	{"sandbox/...", []string{"vmm/...", "devices/...", "snapshot", "snapshot/freepages", "snapshot/pagecache", "snapshot/pager", "netpolicy", "netpolicy/link", "netpolicy/proxy", "netpolicy/hostnet", "rootfs/...", "guest", "guest/audit", "internal/osfile"}},

	{"vmm/guestmem", nil},
	{"vmm/kvm", nil},
	{"vmm/boot", []string{"vmm/guestmem"}},
	{"vmm/...", []string{"vmm/...", "devices/...", "snapshot/pager"}},

	{"devices/virtq", []string{"vmm/guestmem"}},
	{"devices", []string{"devices/virtq", "vmm/guestmem"}},
	{"devices/...", []string{"devices", "devices/virtq", "vmm/guestmem"}},

	{"snapshot/...", []string{"snapshot", "vmm/guestmem", "internal/osfile"}},
	// The model of policies, also for clients on other systems. See TestModel_of_policies_is_for_all_systems.
	{"netpolicy", nil},
	{"netpolicy/bpf", nil},
	{"netpolicy/refmodel", []string{"netpolicy"}},
	{"netpolicy/refmodel/flowtest", []string{"netpolicy", "netpolicy/refmodel"}},
	{"netpolicy/flow", []string{"netpolicy", "netpolicy/bpf"}},
	{"netpolicy/link", []string{"netpolicy", "netpolicy/bpf", "netpolicy/flow", "internal/osfile"}},
	{"netpolicy/...", []string{"netpolicy", "netpolicy/flow", "netpolicy/tlsname", "netpolicy/resolver", "internal/osfile"}},
	// The store imports no source of images, since a VM's process imports the store.
	{"rootfs/image", []string{"rootfs/image/fstree", "rootfs/image/sparse", "rootfs/image/erofs", "rootfs/internal/artifact", "internal/osfile"}},
	{"rootfs/image/imagetest", []string{"rootfs/image/erofs", "rootfs/image/fstree", "rootfs/image/sparse"}},
	{"rootfs/image/fstree", nil},
	{"rootfs/image/sparse", nil},
	{"rootfs/image/erofs", []string{"rootfs/image/fstree", "rootfs/image/sparse"}},
	{"rootfs/image/debian", []string{"rootfs/image", "rootfs/image/fstree", "rootfs/internal/artifact"}},
	{"rootfs/image/layers", []string{"rootfs/image", "rootfs/image/fstree", "rootfs/image/sparse", "rootfs/image/erofs", "rootfs/internal/artifact"}},
	{"rootfs/image/oci", []string{"rootfs/image", "rootfs/image/fstree", "rootfs/image/sparse", "rootfs/image/erofs", "rootfs/image/layers", "rootfs/internal/artifact", "internal/osfile"}},
	{"rootfs/...", []string{"rootfs/...", "internal/osfile"}},
	// The parts of the agent import neither the agent nor each other, except for lower parts.
	{"guest/agent/poll", nil},
	{"guest/agent/machine", []string{"guest/agent/early", "guest/agentpb"}},
	{"guest/agent/proc", []string{"guest/agent/poll", "guest/agentpb", "guest/internal/flow"}},
	{"guest/agent/service", []string{"guest/agent/proc", "guest/agentpb", "guest/internal/flow"}},
	{"guest/agent/capture", []string{"guest/agent/proc", "guest/agent/machine", "guest/agent/poll", "guest/agentpb"}},
	{"guest/agent/files", []string{"guest/agent/fswatch", "guest/agentpb", "guest/internal/...", "internal/osfile"}},
	// The agent's program has only what it needs in a guest.
	{"guest/agent/...", []string{"guest/..."}},
	{"guest/...", []string{"guest/...", "internal/osfile"}},

	{"internal/doctor", []string{"sandbox/jail/confine", "sandbox/network", "vmm", "vmm/kvm", "vmm/boot", "snapshot/pager", "rootfs/...", "sandbox/hosthooks"}},
	// Packages that only tests import.
	{"internal/test/devicetest", []string{"devices", "devices/virtq", "devices/mmio", "vmm/guestmem"}},
	{"internal/test/guesttest/...", []string{"internal/osfile", "sandbox/...", "vmm/...", "devices/...", "snapshot/...", "rootfs/...", "guest", "internal/test/hwkvm/..."}},
	{"internal/test/faultfs", []string{"internal/osfile"}},
	{"internal/test/farfiles", []string{"internal/osfile"}},
	// What runs inside has no dependencies, since it is built offline.
	{"internal/test/hwkvm/guestinit", []string{"internal/test/hwkvm/wire"}},
	{"internal/test/hwkvm/wire", nil},
	{"internal/test/hwkvm/...", []string{"internal/test/hwkvm/...", "internal/osfile", "rootfs/kernel", "vmm/boot"}},
	// It takes the place of a VM's process, with every device.
	{"internal/test/lazyram", []string{"snapshot", "snapshot/pager", "vmm/guestmem"}},
	{"internal/test/hostileguest", []string{"vmm/...", "devices/...", "rootfs/disk"}},
	{"internal/test/systemd", []string{"internal/test/hwkvm"}},
	{"internal/test/workloads", []string{"sandbox/...", "netpolicy", "guest", "guest/forward"}},
	{"internal/test/jailproofs", []string{"sandbox/...", "netpolicy", "guest", "devices/net/tap"}},
}

// forTests is what all tests may import in addition.
var forTests = []string{"sandbox/sandboxtest", "guest/fakeguest", "devices/handover", "devices/secrets", "devices/mmio", "vmm/guestmem", "guest/sshd", "internal/..."}

// testsOf is what the tests of single packages may import in addition to forTests.
var testsOf = map[string][]string{
	// One test names every exported error and its answer.
	"sandbox/api": {"guest/agent", "guest/agentpb", "guest/audit", "netpolicy/flow", "netpolicy/hostnet", "netpolicy/link", "rootfs/...", "sandbox/state/statetest", "snapshot", "vmm/..."},
	// The tests check that it keeps what package fleet promises.
	"sandbox/sandboxtest": {"sandbox/fleet/...", "sandbox/limits", "sandbox/lifetime", "sandbox/events"},
	"sandbox/fleet":       {"guest"},
	// They ask a host as its clients do.
	"sandbox/cluster": {"sandbox/api/...", "sandbox/gateway", "sandbox/e2b", "sandbox/records", "sandbox/blob/s3", "sandbox/blob/sealed", "sandbox/fleet", "sandbox/instance", "netpolicy", "guest"},
	// Its judges are real servers.
	"kubernetes/controller": {"sandbox", "sandbox/api", "sandbox/api/tokens", "sandbox/api/wire", "sandbox/blob", "sandbox/cluster/...", "sandbox/instance", "sandbox/state"},
	"sandbox/archive":       {"sandbox", "sandbox/blob/s3", "sandbox/instance", "sandbox/spec", "netpolicy", "guest"},
	// The tests compare policies with the reference model, and test their parts together.
	"netpolicy/link":      {"netpolicy/refmodel/...", "netpolicy/hostnet", "netpolicy/resolver"},
	"netpolicy/resolver":  {"netpolicy/link"},
	"netpolicy/tlsname":   {"netpolicy/link"},
	"netpolicy/proxy":     {"netpolicy/refmodel"},
	"rootfs/image/debian": {"rootfs/image/imagetest"},
	"rootfs/image/layers": {"rootfs/image/imagetest"},
	"rootfs/image/oci":    {"rootfs/image/imagetest"},
}

func matches(pattern, pkg string) bool {
	if dir, ok := strings.CutSuffix(pattern, "/..."); ok {
		return pkg == dir || strings.HasPrefix(pkg, dir+"/")
	}
	return pkg == pattern
}

func allowed(pkg, imported string, test bool) bool {
	if imported == pkg || strings.HasPrefix(imported, pkg+"/") || slices.Contains(forAll, imported) {
		return true
	}
	is := func(pattern string) bool { return matches(pattern, imported) }
	if test && (slices.ContainsFunc(forTests, is) || slices.ContainsFunc(testsOf[pkg], is)) {
		return true
	}
	for _, r := range rules {
		if matches(r.of, pkg) {
			return slices.ContainsFunc(r.may, is)
		}
	}
	return false
}

// A source is a Go file. Its path is relative to the module.
type source struct {
	path string
	file *ast.File
}

func (s source) pkg() string  { return path.Dir(s.path) }
func (s source) isTest() bool { return strings.HasSuffix(s.path, "_test.go") }

// violations returns the forbidden imports of a file.
func (s source) violations() []string {
	var out []string
	for _, spec := range s.file.Imports {
		name, err := strconv.Unquote(spec.Path.Value)
		if err != nil {
			continue // the compiler reports it
		}
		switch rest, own := strings.CutPrefix(name, module+"/"); {
		case name == "unsafe" && ast.IsGenerated(s.file):
			// protoc-gen-go imports unsafe.
		case name == "unsafe" && !strings.HasSuffix(s.path, "_unsafe.go") && !strings.HasSuffix(s.path, "_unsafe_test.go"):
			out = append(out, s.path+" imports unsafe: put what needs it into a file named *_unsafe.go")
		case name == "C":
			out = append(out, s.path+" uses cgo: the programs are static, and built without a C compiler")
		case own && !allowed(s.pkg(), rest, s.isTest()):
			out = append(out, fmt.Sprintf("%s imports %s, which package %s may not: see the rules in internal/archtest", s.path, rest, s.pkg()))
		}
	}
	return out
}

func parse(t *testing.T, name string, text []byte) source {
	t.Helper()
	f, err := parser.ParseFile(token.NewFileSet(), name, text, parser.ImportsOnly|parser.ParseComments)
	if err != nil {
		t.Fatal(err)
	}
	return source{name, f}
}

// sources reads all Go files of the module.
func sources(t *testing.T) []source {
	t.Helper()
	root, err := filepath.Abs("../..")
	if err != nil {
		t.Fatal(err)
	}
	if _, err := os.Stat(filepath.Join(root, "go.mod")); err != nil {
		t.Fatal(err)
	}
	var out []source
	err = filepath.WalkDir(root, func(p string, e fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		name := e.Name()
		if e.IsDir() {
			if p != root && (strings.HasPrefix(name, ".") || strings.HasPrefix(name, "_") || name == "testdata" || name == "bin") {
				return fs.SkipDir
			}
			return nil
		}
		if !strings.HasSuffix(name, ".go") {
			return nil
		}
		text, err := os.ReadFile(p)
		if err != nil {
			return err
		}
		rel, err := filepath.Rel(root, p)
		if err != nil {
			return err
		}
		out = append(out, parse(t, filepath.ToSlash(rel), text))
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	return out
}

func TestImports_run_one_way_and_unsafe_stays_in_its_files(t *testing.T) {
	all := sources(t)
	if len(all) < 100 {
		t.Fatalf("only %d Go files found: is this the module?", len(all))
	}
	for _, s := range all {
		for _, v := range s.violations() {
			t.Error(v)
		}
	}
}

// The program of a VM's process must have only what a VM needs: a guest that breaks out reaches all of it.
func TestProgram_of_a_VM_has_no_more_than_a_VM_needs(t *testing.T) {
	imports := map[string]map[string]bool{} // imports of each package of this module
	for _, s := range sources(t) {
		if s.isTest() {
			continue
		}
		of := imports[s.pkg()]
		if of == nil {
			of = map[string]bool{}
			imports[s.pkg()] = of
		}
		for _, i := range s.file.Imports {
			name, err := strconv.Unquote(i.Path.Value)
			if err != nil {
				t.Fatal(err)
			}
			of[name] = true
		}
	}
	from := map[string]string{"cmd/drowse-vmm": ""} // the importer of each package
	for next := []string{"cmd/drowse-vmm"}; len(next) > 0; next = next[1:] {
		for name := range imports[next[0]] {
			own, ok := strings.CutPrefix(name, module+"/")
			if !ok {
				own = name
			}
			if _, seen := from[own]; !seen {
				from[own] = next[0]
				next = append(next, own)
			}
		}
	}
	if _, ok := from["sandbox/instance"]; !ok {
		t.Fatal("the program does not lead to a VM: is this looking at it?")
	}
	for _, unwanted := range []string{
		"bench", "cmd/drowse", "rootfs/image/builder", "rootfs/image/debian", "rootfs/image/drowsefile", "rootfs/image/layers", "rootfs/image/oci", "sandbox/api", "sandbox/build", "sandbox/e2b", "sandbox/fleet", "sandbox/gateway", "sandbox/mcp", "sandbox/metrics", "sandbox/records", "sandbox/supervisor", "sandbox/traces",
		"github.com/google/go-containerregistry", "github.com/spf13/cobra", "github.com/prometheus", "go.opentelemetry.io", "html/template", "testing",
	} {
		for name, by := range from {
			if name == unwanted || strings.HasPrefix(name, unwanted+"/") {
				t.Errorf("drowse-vmm has %s, by %s", name, by)
			}
		}
	}
}

// All state is in files: docs/adr/0041-lists-and-histories-are-read-from-the-files.md.
func TestNo_package_and_no_dependency_is_a_database(t *testing.T) {
	for _, s := range sources(t) {
		for _, i := range s.file.Imports {
			if strings.Contains(i.Path.Value, "sqlite") || i.Path.Value == `"database/sql"` {
				t.Errorf("%s imports %s", s.path, i.Path.Value)
			}
		}
	}
	mod, err := os.ReadFile("../../go.mod")
	if err != nil {
		t.Fatal(err)
	}
	if strings.Contains(string(mod), "sqlite") {
		t.Error("go.mod requires SQLite")
	}
}

// A process starts for each VM and each command. It must not compile expressions that it does not use.
func TestRegular_expressions_are_compiled_when_they_are_used(t *testing.T) {
	for _, s := range sources(t) {
		for _, d := range s.file.Decls {
			v, ok := d.(*ast.GenDecl)
			if !ok || s.isTest() || strings.HasPrefix(s.path, "internal/") {
				continue
			}
			ast.Inspect(v, func(n ast.Node) bool {
				if sel, ok := n.(*ast.SelectorExpr); ok && sel.Sel.Name == "MustCompile" {
					t.Errorf("%s compiles an expression when a program starts: use %s", s.path, lazyregexp)
				}
				return true
			})
		}
	}
}

// Programs on other systems use the HTTP API through the client. It must compile for these systems, and must
// import only documents and nothing of a VMM.
func TestClient_of_the_API_is_for_all_systems(t *testing.T) {
	const client = module + "/sandbox/api/client"
	out, err := exec.Command("go", "list", "-deps", client).Output()
	if err != nil {
		t.Fatal(err)
	}
	documents := []string{lazyregexp, "netpolicy", "guest/report", "guest/agentpb", "sandbox/lifetime", "sandbox/spec", "sandbox/records", "sandbox/api/wire", "sandbox/api/client"}
	for _, name := range strings.Fields(string(out)) {
		if own, ok := strings.CutPrefix(name, module+"/"); ok && !slices.Contains(documents, own) {
			t.Errorf("it links %s", own)
		}
	}
	// The command line too is for all of them, through a server. Two packages at once are compiled, and not linked.
	for _, on := range []string{"darwin/amd64", "darwin/arm64", "windows/amd64", "windows/arm64", "linux/arm64"} {
		cmd := exec.Command("go", "build", client)
		system, processor, _ := strings.Cut(on, "/")
		if system != "linux" {
			cmd.Args = append(cmd.Args, module+"/cmd/drowse")
		}
		cmd.Env = append(os.Environ(), "GOOS="+system, "GOARCH="+processor, "CGO_ENABLED=0")
		if out, err := cmd.CombinedOutput(); err != nil {
			t.Errorf("%s: %v\n%s", on, err, out)
		}
	}
}

// Clients on other systems read and write policies, and the records of their effects.
func TestModel_of_policies_is_for_all_systems(t *testing.T) {
	seen := false
	for _, s := range sources(t) {
		if s.pkg() != "netpolicy" || s.isTest() {
			continue
		}
		seen = true
		for _, i := range s.file.Imports {
			name, err := strconv.Unquote(i.Path.Value)
			if err != nil {
				t.Fatal(err)
			}
			if first, _, _ := strings.Cut(name, "/"); name == "syscall" || strings.Contains(first, ".") && first != "go.yaml.in" {
				t.Errorf("%s imports %s: what needs Linux belongs into netpolicy/link or netpolicy/flow", s.path, name)
			}
		}
	}
	if !seen {
		t.Fatal("there is no package netpolicy")
	}
}

func TestEvery_package_says_what_it_is_for(t *testing.T) {
	documented := map[string]bool{}
	for _, s := range sources(t) {
		if !s.isTest() {
			documented[s.pkg()] = documented[s.pkg()] || s.file.Doc != nil
		}
	}
	for pkg, ok := range documented {
		if !ok {
			t.Errorf("package %s has no package comment: give it a doc.go", pkg)
		}
	}
}

func TestViolations_are_found(t *testing.T) {
	tests := []struct {
		file, imports string
		want          int
	}{
		{"vmm/machine.go", module + "/devices/serial", 0},
		{"vmm/machine.go", module + "/snapshot/pager", 0},
		{"vmm/machine.go", module + "/snapshot", 1},
		{"vmm/machine.go", module + "/sandbox", 1},
		{"vmm/guestmem/memory.go", module + "/vmm", 1},
		{"devices/blk/device.go", module + "/vmm/guestmem", 0},
		{"devices/blk/device.go", module + "/vmm/kvm", 1},
		{"devices/blk/device.go", module + "/devices/vsock", 1},
		{"devices/blk/device_test.go", module + "/internal/test/devicetest", 0},
		{"devices/blk/device.go", module + "/internal/test/devicetest", 1},
		{"snapshot/create.go", module + "/vmm", 1},
		{"rootfs/disk/disk.go", module + "/snapshot", 1},
		{"guest/client.go", module + "/vmm/guestmem", 1},
		{"guest/client.go", module + "/guest/internal/flow", 0},
		{"cmd/drowse/main.go", module + "/sandbox", 0},
		{"cmd/drowse/main.go", module + "/vmm", 1},
		{"cmd/drowse/main.go", module + "/internal/doctor", 0},
		{"cmd/drowse/main.go", module + "/internal/test/guesttest", 1},
		{"cmd/drowse-agent/main.go", module + "/sandbox", 1},
		{"elsewhere/new.go", module + "/vmm", 1},
		{"vmm/access.go", "unsafe", 1},
		{"vmm/access_unsafe.go", "unsafe", 0},
		{"vmm/access_unsafe_test.go", "unsafe", 0},
		{"vmm/access.go", "C", 1},
	}
	for _, tt := range tests {
		t.Run(tt.file+" imports "+tt.imports, func(t *testing.T) {
			s := parse(t, tt.file, fmt.Appendf(nil, "package p\nimport _ %q\n", tt.imports))
			if got := s.violations(); len(got) != tt.want {
				t.Errorf("%d violations, want %d: %q", len(got), tt.want, got)
			}
		})
	}
}
