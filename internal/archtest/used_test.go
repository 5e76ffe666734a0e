package archtest

import (
	"go/ast"
	"go/parser"
	"go/token"
	"maps"
	"os"
	"path"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"
)

// unused is what only tests or programs elsewhere use, with what needs it.
var unused = map[string]string{
	"cmd/drowse: method MarshalJSON":           "package json calls it",
	"devices/handover.Failed":                  "the protocol has it",
	"guest/agent/upper.OpenAt":                 "tests of two packages, which may not mount",
	"kubernetes/agents.Retain":                 "the upstream API has it",
	"kubernetes/agents: method DeepCopyObject": "runtime.Object",
	"kubernetes/controller: method Reconcile":  "reconcile.Reconciler",
	"netpolicy: method UnmarshalJSON":          "package json calls it",
	"rootfs/kernel.Download":                   "internal/test/hwkvm",
	"sandbox/api.Draining":                     "handlers of programs that embed the API",
	"sandbox/api.OpenAPI":                      "programs that embed the API",
	"sandbox/api/client: method ImportImage":   "programs that embed the client",
	"sandbox/api/client: method ReadPart":      "programs that embed the client",
	"sandbox/api/client: method RemoveProcess": "programs that embed the client",
	"sandbox/api/client: method StartProcess":  "programs that embed the client",
	"sandbox/api/wire.FileEvents":              "the description of the API",
	"sandbox/api/wire.FileKinds":               "the description of the API",
	"sandbox/api/wire.OperationStates":         "the description of the API",
	"sandbox/api/wire.SecretSourceKinds":       "the description of the API",
	"sandbox/api/wire.TemplateStates":          "the description of the API",
	"sandbox/archive.maxFrames":                "it says what the bounds of a file come to",
	"sandbox/e2b: method WrapStreamingClient":  "connect.Interceptor",
	"sandbox/e2b: method WrapStreamingHandler": "connect.Interceptor",
	"sandbox/e2b: method WrapUnary":            "connect.Interceptor",
	"sandbox/events: method Subscribe":         "programs that embed drowse: docs/guides/events.md",
	"sandbox/process.SetStack":                 "tests of package sandbox",
	"snapshot: method NumFrames":               "tests of several packages",
	"snapshot: method ReadPage":                "tests of several packages",
}

// A declaration is a name of a package, or of a method.
type declaration struct {
	pkg, name string
	method    bool
}

func (d declaration) String() string {
	if d.method {
		return d.pkg + ": method " + d.name
	}
	return d.pkg + "." + d.name
}

// testSupport reports whether only tests import a package, by its path: see internal/loc.
func testSupport(pkg string) bool {
	return strings.HasPrefix(pkg, "internal/test/") || strings.HasSuffix(pkg, "test") || strings.HasPrefix(path.Base(pkg), "fake")
}

// unusedIn returns what files declare and none of them uses. A method counts as used if anything has its name: which
// type a selector is of, only the compiler knows.
func unusedIn(files []source) []declaration {
	uses := map[declaration]int{}
	declared := map[declaration]int{}
	for _, s := range files {
		packages := map[string]string{} // by the name in this file
		for _, spec := range s.file.Imports {
			of, err := strconv.Unquote(spec.Path.Value)
			if err != nil || !strings.HasPrefix(of, module+"/") {
				continue
			}
			name := path.Base(of)
			if spec.Name != nil {
				name = spec.Name.Name
			}
			packages[name] = strings.TrimPrefix(of, module+"/")
		}
		ast.Inspect(s.file, func(n ast.Node) bool {
			switch n := n.(type) {
			case *ast.SelectorExpr:
				if x, ok := n.X.(*ast.Ident); ok && packages[x.Name] != "" {
					uses[declaration{packages[x.Name], n.Sel.Name, false}]++
				}
			case *ast.Ident:
				uses[declaration{s.pkg(), n.Name, false}]++
				uses[declaration{"", n.Name, true}]++
			}
			return true
		})
		if ast.IsGenerated(s.file) {
			continue
		}
		for _, d := range s.file.Decls {
			for _, name := range names(d) {
				declared[declaration{s.pkg(), name.Name, isMethod(d)}]++
			}
		}
	}
	var out []declaration
	for d, times := range declared {
		use := d
		if d.method {
			use.pkg = ""
		}
		if uses[use] == times && !slices.Contains([]string{"main", "init", "_"}, d.name) {
			out = append(out, d)
		}
	}
	slices.SortFunc(out, func(a, b declaration) int { return strings.Compare(a.String(), b.String()) })
	return out
}

func isMethod(d ast.Decl) bool {
	f, ok := d.(*ast.FuncDecl)
	return ok && f.Recv != nil
}

// names returns what a declaration at the level of the package gives names to.
func names(d ast.Decl) (out []*ast.Ident) {
	switch d := d.(type) {
	case *ast.FuncDecl:
		out = append(out, d.Name)
	case *ast.GenDecl:
		for _, s := range d.Specs {
			switch s := s.(type) {
			case *ast.ValueSpec:
				out = append(out, s.Names...)
			case *ast.TypeSpec:
				out = append(out, s.Name)
			}
		}
	}
	return out
}

func TestNothing_is_there_for_its_tests_alone(t *testing.T) {
	var files []source
	for _, s := range sources(t) {
		if s.isTest() || testSupport(s.pkg()) {
			continue
		}
		text, err := os.ReadFile(filepath.Join("../..", s.path))
		if err != nil {
			t.Fatal(err)
		}
		files = append(files, whole(t, s.path, string(text)))
	}
	found := map[string]bool{}
	for _, d := range unusedIn(files) {
		found[d.String()] = true
		if unused[d.String()] == "" {
			t.Errorf("%s is used by tests at most: remove it, put it into a test, or say in `unused` who needs it", d)
		}
	}
	for _, name := range slices.Sorted(maps.Keys(unused)) {
		if !found[name] {
			t.Errorf("%s is used, or is not there any more: remove it from `unused`", name)
		}
	}
}

// whole is parse with what files declare.
func whole(t *testing.T, name, text string) source {
	t.Helper()
	f, err := parser.ParseFile(token.NewFileSet(), name, text, parser.ParseComments|parser.SkipObjectResolution)
	if err != nil {
		t.Fatal(err)
	}
	return source{name, f}
}

func TestUnused_declarations_are_found(t *testing.T) {
	files := []source{
		whole(t, "a/a.go", ("package a\n\nimport \"" + module + "/b\"\n\nconst One = 1\n\nfunc two() int { return One + b.Used }\n\ntype T struct{}\n\nfunc (T) Lost() {}\n\nfunc (T) Found() {}\n\nvar _ = two\n")),
		whole(t, "b/b.go", ("package b\n\nvar Used, Gone int\n\ntype I interface{ Found() }\n\nfunc init() {}\n")),
	}
	var got []string
	for _, d := range unusedIn(files) {
		got = append(got, d.String())
	}
	if want := []string{"a: method Lost", "b.Gone", "b.I"}; !slices.Equal(got, want) {
		t.Errorf("%q, want %q", got, want)
	}
}
