//go:build linux

package main

import (
	"context"
	"encoding/base64"
	"encoding/json"
	"fmt"
	"io"
	"log"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-containerregistry/pkg/name"
	"github.com/google/go-containerregistry/pkg/registry"
	"github.com/google/go-containerregistry/pkg/v1/empty"
	"github.com/google/go-containerregistry/pkg/v1/mutate"
	"github.com/google/go-containerregistry/pkg/v1/remote"

	"github.com/drowse-vm/drowse/guest/fakeguest"
	"github.com/drowse-vm/drowse/sandbox"
	"github.com/drowse-vm/drowse/sandbox/sandboxtest"
	"github.com/drowse-vm/drowse/sandbox/spec"
	"github.com/drowse-vm/drowse/sandbox/state"
)

// inMemory makes the commands of a test use VMs in memory, and returns their state directory.
func inMemory(t *testing.T) (dir string, h *sandbox.Host, vms *sandboxtest.VMs) {
	t.Helper()
	vms = &sandboxtest.VMs{Commands: map[string]fakeguest.Command{
		"env": func(_ context.Context, p *fakeguest.Process) int {
			fmt.Fprintln(p.Stdout, strings.Join(p.Env, " "), p.Dir, p.User)
			return 0
		},
		"exit3": func(context.Context, *fakeguest.Process) int { return 3 },
		"both": func(_ context.Context, p *fakeguest.Process) int {
			fmt.Fprintln(p.Stdout, "out")
			fmt.Fprintln(p.Stderr, "err")
			return 0
		},
		"--flag": func(context.Context, *fakeguest.Process) int { return 0 },
	}}
	h = vms.Host(t)
	processes = vms
	t.Cleanup(func() { processes = nil })
	l, err := vms.Launcher(h)
	if err != nil {
		t.Fatal(err)
	}
	t.Setenv("DROWSE_AGENT", l.Agent)
	t.Setenv("DOCKER_CONFIG", t.TempDir())
	t.Setenv("REGISTRY_AUTH_FILE", filepath.Join(t.TempDir(), "none"))
	was := resolvConf
	resolvConf = filepath.Join(t.TempDir(), "resolv.conf")
	t.Cleanup(func() { resolvConf = was })
	if err := os.WriteFile(resolvConf, []byte("nameserver 192.0.2.53\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	return h.State.Dir(), h, vms
}

// TestDocker_command_lines_do_what_they_do_there_or_say_what_to_do runs what a user of docker types, in order, in one
// host. The image "test" says nothing to run.
func TestDocker_command_lines_do_what_they_do_there_or_say_what_to_do(t *testing.T) {
	dir, h, _ := inMemory(t)
	dir2 := t.TempDir()
	env := filepath.Join(dir2, "vars")
	if err := os.WriteFile(env, []byte("# a comment\nFROM_FILE=1\nHERE\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	t.Setenv("HERE", "there")
	file := filepath.Join(dir2, "f")
	if err := os.WriteFile(file, []byte("content"), 0o600); err != nil {
		t.Fatal(err)
	}
	const some = "\x00" // any text, but some
	for _, tt := range []struct {
		line   string // after "docker"
		want   int
		stdout string // all of it
		says   string // in stderr
	}{
		// run
		{"run --rm test echo hi there", 0, "hi there\n", ""},
		{"run --rm --name x test echo -n --rm", 0, "-n --rm\n", ""},
		{"run --rm test exit3", 3, "", ""},
		{"run --rm test false", 1, "", ""},
		{"run --rm test nothing", 127, "", "nothing"},
		{"run --rm test both", 0, "out\n", "err\n"},
		{"run --rm -i test cat", 0, "", ""},
		{"run --rm test cat", 0, "", ""},
		{"run --rm -- test echo x", 0, "x\n", ""},
		{"run --rm test -- echo x", 0, "x\n", ""},
		{"run -d --name a test", 0, "a\n", ""},
		{"run -d --name a test", exitExec, "", "drowse rm a"},
		{"run -dit --name b test cat", 0, "b\n", ""},
		{"run -d --name c -m 512m --cpus 2 -h box test", 0, "c\n", ""},
		{"run -d --name d -m 1g --cpus=1.0 --hostname=d2 test true", 0, "d\n", ""},
		{"run --rm -e A=1 -e HERE -e NOT_SET_HERE -w /srv -u dev test env", 0, "PATH=/bin HOME=/root A=1 HERE=there /srv dev\n", ""},
		{"run --rm --env-file " + env + " -e FROM_FILE=2 test env", 0, "PATH=/bin HOME=/root FROM_FILE=1 HERE=there FROM_FILE=2  \n", ""},
		{"run --rm --entrypoint echo test hi", 0, "hi\n", ""},
		{"run --rm --entrypoint= test echo hi", 0, "hi\n", ""},
		{"run --rm --net none test true", 0, "", ""},
		{"run --rm --network none test true", 0, "", ""},
		{"run -d --name n --net open test", 0, "n\n", ""},
		{"run -d --name p -p 8080:80 -p 127.0.0.1:5353:53/udp test", 0, "p\n", "drowse serve"},
		{"run --rm --pull never test true", 0, "", ""},
		{"run --rm --pull=missing test true", 0, "", ""},
		{"run --rm --help", 0, some, ""},
		{"run -h", exitUsage, "", "needs an argument"},
		{"run", exitUsage, "", "no image is named"},
		{"run test", exitUsage, "", "drowse run -it IMAGE sh"},
		{"run --pull never other true", exitExec, "", "no such image"},
		{"run --pull never tets true", exitExec, "", "did you mean test?"},
		{"run test --rm true", exitUsage, "", "flags of drowse stand before the image"},
		{"run -d --rm test true", exitUsage, "", "--class ephemeral --ttl"},
		{"run -v /data test true", exitUsage, "", "drowse volume create"},
		{"run -v data:/data test true", exitExec, "", "drowse volume create data"},
		{"run -v " + dir2 + " test true", exitUsage, "", "NAME:"},
		{"run -v " + dir2 + ":/proc test true", exitUsage, "", "system"},
		{"run -p 80 test true", exitUsage, "", "the port of the host is missing"},
		{"run -p 8000-8010:8000-8010 test true", exitUsage, "", "one --publish for each"},
		{"run -P test true", exitUsage, "", "--publish PORT:GUESTPORT"},
		{"run --network bridge test true", exitUsage, "", "--net bridge: use open"},
		{"run --network host test true", exitUsage, "", "use open"},
		{"run --network mynet test true", exitUsage, "", "tags"},
		{"run --cpus 1.5 test true", exitUsage, "", "whole CPUs"},
		{"run -m lots test true", exitUsage, "", "512m or 2g"},
		{"run -m 16m test true", exitUsage, "", "64 to 16384"},
		{"run --privileged test true", exitUsage, "", "a kernel of its own"},
		{"run --cap-add NET_ADMIN test true", exitUsage, "", "a kernel of its own"},
		{"run --restart always test true", exitUsage, "", "drowse service set"},
		{"run --gpus all test true", exitUsage, "", "no devices of the host"},
		{"run --mount type=bind,src=/a,dst=/b test true", exitUsage, "", "--volume"},
		{"run --link a test true", exitUsage, "", "--tag"},
		{"run -l k=v test true", exitUsage, "", "--tag"},
		{"run --init test true", exitUsage, "", "init that reaps"},
		{"run --nam x test true", exitUsage, "", "did you mean --name?"},
		// ps, inspect and others
		{"ps -q", 0, "a\nb\nc\nd\nn\np\n", ""},
		{"ps", 0, some, ""},
		{"ps -aq --filter name=a", 0, "a\n", ""},
		{"ps -q -f status=running -f name=c -f name=d", 0, "c\nd\n", ""},
		{"ps --filter status=exited", exitUsage, "", "stopped is docker's exited"},
		{"ps --format {{.Names}}", exitUsage, "", "-o json"},
		{"port p", 0, "80/tcp -> 0.0.0.0:8080\n53/udp -> 127.0.0.1:5353\n", ""},
		{"port p 80", 0, "0.0.0.0:8080\n", ""},
		{"port p 81", exitFailed, "", "drowse port-forward p 8080:81"},
		{"inspect a b", 0, some, ""},
		{"inspect a bb", exitFailed, some, "did you mean b?"},
		{"exec a echo hi", 0, "hi\n", ""},
		{"exec -it a true", 0, "", ""},
		{"exec -e A=1 -w /tmp -u me a env", 0, "PATH=/bin HOME=/root A=1 /tmp me\n", ""},
		{"exec -d a sleep 0", 0, some, ""},
		{"exec a exit3", 3, "", ""},
		{"exec --privileged a true", exitUsage, "", "a kernel of its own"},
		{"cp " + file + " a:/root/f", 0, "", ""},
		{"exec a cat /root/f", 0, "content", ""},
		{"cp a:/root/f " + file + "2", 0, "", ""},
		{"cp a:/x b:/y", exitUsage, "", "exactly one"},
		{"logs a", 0, "", ""},
		{"logs --tail 10 a", 0, "", ""},
		{"logs --tail ten a", exitUsage, "", "a number of lines"},
		{"logs --since 10m a", exitUsage, "", "--tail"},
		{"logs aa", exitFailed, "", "no such VM"},
		{"attach aa", exitExec, "", "did you mean a?"},
		{"stop a b", 0, "a\nb\n", ""},
		{"ps -q", 0, "c\nd\nn\np\n", ""},
		{"ps -aq", 0, "a\nb\nc\nd\nn\np\n", ""},
		{"start a b", 0, "a\nb\n", ""},
		{"start a nobody", exitFailed, "", "no such VM"},
		{"kill a", 0, "a\n", ""},
		{"kill -s HUP nobody", exitFailed, "", "no such VM"},
		{"kill -s NOSUCH b", exitUsage, "", "TERM, HUP or 9"},
		{"pause b", exitUsage, "", "drowse sleep"},
		{"unpause b", exitUsage, "", "drowse wake"},
		{"restart b", exitUsage, "", "drowse stop NAME && drowse start NAME"},
		{"rename b b2", exitFailed, "", "run"},
		{"stats --no-stream", exitUsage, "", ""},
		// images
		{"images -q", 0, some, ""},
		{"images", 0, some, ""},
		{"image ls", 0, some, ""},
		{"rmi test", exitFailed, "", "VM a"},
		{"rmi tset", exitFailed, "", "did you mean test?"},
		{"pull", exitUsage, "", "drowse pull --help"},
		{"build -t x .", exitUsage, "", "drowse image build --file"},
		{"login", exitUsage, "", "docker login"},
		{"push x", exitUsage, "", "oci-archive"},
		{"commit a x", exitUsage, "", "drowse snapshot"},
		// the host
		{"version", 0, some, ""},
		{"-v", 0, some, ""},
		{"--version", 0, some, ""},
		{"info", 0, some, ""},
		{"df", 0, some, ""},
		{"system df", exitUsage, "", "drowse df"},
		{"container ls", exitUsage, "", "drowse ls"},
		{"network ls", exitUsage, "", "--net"},
		{"volume create data", 0, "data\n", ""},
		{"run --rm -v data:/data test true", 0, "", ""},
		{"volume ls", 0, some, ""},
		{"volume rm data nodata", exitFailed, "data\n", "nodata"},
		{"compose up", exitUsage, "", "drowse run"},
		{"rnu test", exitUsage, "", "did you mean `drowse run`?"},
		{"imgae ls", exitUsage, "", "did you mean `drowse image`?"},
		{"rm b", exitFailed, "", "b"},
		{"rm -f b nobody c", exitFailed, "b\nc\n", "no such VM"},
	} {
		t.Run(tt.line, func(t *testing.T) {
			code, stdout, stderr := drowse(t, dir, strings.Fields(tt.line)...)
			if code != tt.want {
				t.Errorf("exit status %d, want %d", code, tt.want)
			}
			if tt.stdout == some && stdout == "" || tt.stdout != some && stdout != tt.stdout {
				t.Errorf("stdout %q, want %q", stdout, tt.stdout)
			}
			if !strings.Contains(stderr, tt.says) {
				t.Errorf("stderr %q, want %q in it", stderr, tt.says)
			}
			if code == exitUsage && strings.Count(stderr, "\n") > 1 {
				t.Errorf("more than a line on stderr: %q", stderr)
			}
		})
	}
	for name, check := range map[string]func(*state.Record) bool{
		"d": func(r *state.Record) bool {
			return r.Spec.MemoryMiB == 1024 && r.Spec.VCPUs == 1 && r.Spec.Hostname == "d2"
		},
		"n": func(r *state.Record) bool {
			return r.Spec.Network == "tap" && r.Spec.Policy.Default.Egress == "allow" && r.Spec.Policy.Default.Ingress == ""
		},
		"p": func(r *state.Record) bool {
			return r.Spec.Network == "tap" && len(r.Spec.Policy.Publish) == 2 && r.Spec.Policy.Default.Egress == ""
		},
	} {
		if r, err := h.State.Get(name); err != nil || !check(r) {
			t.Errorf("VM %s is %+v (%v)", name, r, err)
		}
	}
}

func TestScript_gets_names_for_xargs_and_errors_as_JSON(t *testing.T) {
	dir, h, _ := inMemory(t)
	var names []string
	for range 3 {
		code, stdout, stderr := drowse(t, dir, "run", "-d", "test")
		name := strings.TrimSuffix(stdout, "\n")
		if code != 0 || stderr != "" || !strings.Contains(name, "-") || strings.ContainsAny(name, " \n") || slices.Contains(names, name) {
			t.Fatalf("exit status %d, stdout %q, stderr %q", code, stdout, stderr)
		}
		names = append(names, name)
	}
	if _, stdout, _ := drowse(t, dir, "sleep", "--all"); strings.Count(stdout, "\n") != 3 {
		t.Errorf("sleep --all printed %q", stdout)
	}
	if _, stdout, _ := drowse(t, dir, "ps", "-aq", "--filter", "status=asleep"); strings.Count(stdout, "\n") != 3 {
		t.Errorf("asleep are %q", stdout)
	}
	if code, stdout, stderr := drowse(t, dir, "wake", "--all"); code != 0 || strings.Count(stdout, "\n") != 3 {
		t.Errorf("wake --all: exit status %d, %q %q", code, stdout, stderr)
	}
	if code, stdout, stderr := drowse(t, dir, "wake", "--all"); code != 0 || stdout != "" {
		t.Errorf("wake --all of none: exit status %d, %q %q", code, stdout, stderr)
	}
	for args, want := range map[string][2]string{
		"inspect nobody -o json":                {"not-found", ""},
		"sleep -o json":                         {codeUsage, "drowse sleep --help"},
		"run -o json --bogus test":              {codeUsage, "see `drowse run --help`"},
		"--output=json rnu":                     {codeUsage, "did you mean `drowse run`?"},
		"run --pull never -o json nothing true": {"", "list the images"},
	} {
		code, stdout, stderr := drowse(t, dir, strings.Fields(args)...)
		var d errorDoc
		if err := json.Unmarshal([]byte(stderr), &d); err != nil || code == 0 || stdout != "" || strings.Count(stderr, "\n") != 1 {
			t.Errorf("%s: exit status %d, stdout %q, stderr %q (%v)", args, code, stdout, stderr, err)
		}
		if want[0] != "" && d.Error.Code != want[0] || d.Error.Message == "" || !strings.Contains(d.Error.Remedy, want[1]) {
			t.Errorf("%s: %+v, want %v", args, d.Error, want)
		}
	}
	if _, err := h.State.SetMetadata(t.Context(), names[0], func(m *spec.Metadata, _ error) error {
		m.Owner, m.Purpose = spec.TemplateOwner, "boots for template 990cfd40"
		return nil
	}); err != nil {
		t.Fatal(err)
	}
	if _, stdout, _ := drowse(t, dir, "ps"); !strings.Contains(stdout, "boots for template 990cfd40") {
		t.Errorf("ps does not say what a VM of drowse's own is for: %q", stdout)
	}
	_, stdout, _ := drowse(t, dir, "ps", "-aq")
	if code, out, stderr := drowse(t, dir, append([]string{"rm", "-f"}, strings.Fields(stdout)...)...); code != 0 || out != stdout {
		t.Errorf("rm -f $(ps -aq): exit status %d, %q %q", code, out, stderr)
	}
	if left, err := h.State.List(); len(left) != 0 || err != nil {
		t.Errorf("left: %v (%v)", left, err)
	}
	_, out, _ := drowse(t, dir, "__complete", "run", "te")
	if !strings.Contains(out, "test:latest") {
		t.Errorf("run te completes to %q", out)
	}
}

func TestAllow_opens_what_it_names(t *testing.T) {
	for word, want := range map[string]string{
		"pypi.org":            `{"name":"pypi.org","direction":"egress","verdict":"allow","cidrs":null,"groups":null,"names":["pypi.org"],"agents":null,"protocols":["tcp"],"ports":["443"]}`,
		"deb.debian.org:80":   `{"name":"deb.debian.org:80","direction":"egress","verdict":"allow","cidrs":null,"groups":null,"names":["deb.debian.org"],"agents":null,"protocols":["tcp"],"ports":["80"]}`,
		"10.0.0.0/8":          `{"name":"10.0.0.0/8","direction":"egress","verdict":"allow","cidrs":["10.0.0.0/8"],"groups":null,"names":null,"agents":null,"protocols":["any"],"ports":["any"]}`,
		"10.1.2.3:5432":       `{"name":"10.1.2.3:5432","direction":"egress","verdict":"allow","cidrs":["10.1.2.3/32"],"groups":null,"names":null,"agents":null,"protocols":["tcp"],"ports":["5432"]}`,
		"10.1.0.0/16:53/udp":  `{"name":"10.1.0.0/16:53/udp","direction":"egress","verdict":"allow","cidrs":["10.1.0.0/16"],"groups":null,"names":null,"agents":null,"protocols":["udp"],"ports":["53"]}`,
		"443":                 `{"name":"443","direction":"egress","verdict":"allow","cidrs":null,"groups":["public"],"names":null,"agents":null,"protocols":["tcp"],"ports":["443"]}`,
		":8000-8080":          `{"name":":8000-8080","direction":"egress","verdict":"allow","cidrs":null,"groups":["public"],"names":null,"agents":null,"protocols":["tcp"],"ports":["8000-8080"]}`,
		"2001:db8::1":         `{"name":"2001:db8::1","direction":"egress","verdict":"allow","cidrs":["2001:db8::1/128"],"groups":null,"names":null,"agents":null,"protocols":["any"],"ports":["any"]}`,
		"[2001:db8::/32]:443": `{"name":"[2001:db8::/32]:443","direction":"egress","verdict":"allow","cidrs":["2001:db8::/32"],"groups":null,"names":null,"agents":null,"protocols":["tcp"],"ports":["443"]}`,
	} {
		r, err := parseAllow(word)
		got, merr := json.Marshal(r)
		if err != nil || merr != nil || string(got) != want {
			t.Errorf("%s: %s (%v)\nwant %s", word, got, err, want)
		}
	}
	was := resolvConf
	defer func() { resolvConf = was }()
	resolvConf = filepath.Join(t.TempDir(), "resolv.conf")
	if err := os.WriteFile(resolvConf, []byte("nameserver 192.0.2.53\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	for _, word := range []string{"", ":", "x:", "https://pypi.org/", "10.0.0.1/8", "a b", "x:0", "x:99999", "/udp", "bad..name"} {
		if p, err := (&netFlags{allow: []string{word}}).common(); err == nil {
			t.Errorf("%q is taken as %+v", word, p.Rules)
		}
	}
}

func TestRun_pulls_a_missing_image_with_docker_s_credentials(t *testing.T) {
	dir, _, _ := inMemory(t)
	hub := registry.New(registry.Logger(log.New(io.Discard, "", 0)))
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if user, password, ok := r.BasicAuth(); r.Header.Get("Test") == "" && (!ok || user != "me" || password != "secret") {
			w.Header().Set("WWW-Authenticate", `Basic realm="test"`)
			w.WriteHeader(http.StatusUnauthorized)
			return
		}
		hub.ServeHTTP(w, r)
	}))
	defer server.Close()
	at := strings.TrimPrefix(server.URL, "http://")
	push(t, at+"/me/app:v1")
	code, stdout, stderr := drowse(t, dir, "run", "--rm", at+"/me/app:v1")
	if code != exitExec || stdout != "" || !strings.Contains(stderr, "docker login") {
		t.Fatalf("without credentials: exit status %d, stdout %q, stderr %q", code, stdout, stderr)
	}
	config := fmt.Sprintf(`{"auths":{%q:{"auth":%q}}}`, at, base64.StdEncoding.EncodeToString([]byte("me:secret")))
	if err := os.WriteFile(filepath.Join(os.Getenv("DOCKER_CONFIG"), "config.json"), []byte(config), 0o600); err != nil {
		t.Fatal(err)
	}
	code, stdout, stderr = drowse(t, dir, "run", "--rm", at+"/me/app:v1")
	if code != 0 || !strings.Contains(stdout, "OF=image") || !strings.Contains(stderr, "pulling it") {
		t.Fatalf("exit status %d, stdout %q, stderr %q", code, stdout, stderr)
	}
	server.Close() // it is there now
	code, stdout, stderr = drowse(t, dir, "run", "--rm", at+"/me/app:v1", "echo", "hi")
	if code != 0 || stdout != "hi\n" || stderr != "" {
		t.Errorf("again: exit status %d, stdout %q, stderr %q", code, stdout, stderr)
	}
	if _, stdout, _ = drowse(t, dir, "images"); !strings.Contains(stdout, at+"/me/app:v1") {
		t.Errorf("images:\n%s", stdout)
	}
	if code, _, stderr = drowse(t, dir, "run", "--rm", "--pull", "always", at+"/me/app:v1"); code != exitExec {
		t.Errorf("--pull always without a registry: exit status %d, %s", code, stderr)
	}
	if code, stdout, stderr = drowse(t, dir, "rmi", at+"/me/app:v1"); code != 0 {
		t.Errorf("rmi: exit status %d, %q %q", code, stdout, stderr)
	}
}

// push writes an image to a registry of this machine. Its command is env.
func push(t *testing.T, to string) {
	t.Helper()
	f, err := empty.Image.ConfigFile()
	if err != nil {
		t.Fatal(err)
	}
	f = f.DeepCopy()
	f.OS, f.Architecture = "linux", runtime.GOARCH
	f.Config.Cmd, f.Config.Env = []string{"env"}, []string{"OF=image"}
	file, err := mutate.ConfigFile(empty.Image, f)
	if err != nil {
		t.Fatal(err)
	}
	ref, err := name.ParseReference(to)
	if err != nil {
		t.Fatal(err)
	}
	if err := remote.Write(ref, file, remote.WithTransport(marked{})); err != nil {
		t.Fatal(err)
	}
}

// marked marks the requests of a test, which need no password.
type marked struct{}

func (marked) RoundTrip(r *http.Request) (*http.Response, error) {
	r = r.Clone(r.Context())
	r.Header.Set("Test", "1")
	return http.DefaultTransport.RoundTrip(r)
}
