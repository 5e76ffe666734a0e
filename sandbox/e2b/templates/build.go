package templates

import (
	"archive/tar"
	"bufio"
	"bytes"
	"cmp"
	"compress/gzip"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"maps"
	"net/http"
	"os"
	"path"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/drowse-vm/drowse/guest"
	"github.com/drowse-vm/drowse/internal/lazyregexp"
	"github.com/drowse-vm/drowse/internal/wait"
	"github.com/drowse-vm/drowse/rootfs/image"
	"github.com/drowse-vm/drowse/sandbox"
	"github.com/drowse-vm/drowse/sandbox/api/tokens"
	"github.com/drowse-vm/drowse/sandbox/e2b/accounts"
	"github.com/drowse-vm/drowse/sandbox/e2b/answers"
	"github.com/drowse-vm/drowse/sandbox/lifetime"
	"github.com/drowse-vm/drowse/sandbox/spec"
)

// buildBody says what a template is made of.
type buildBody struct {
	FromImage    string          `json:"fromImage"`
	FromTemplate string          `json:"fromTemplate"`
	Registry     json.RawMessage `json:"fromImageRegistry"`
	Steps        []buildStep     `json:"steps"`
	StartCmd     string          `json:"startCmd"`
	ReadyCmd     string          `json:"readyCmd"`
	Force        bool            `json:"force"` // steps always run
}

// buildStep is a step. The client has used the last four for its upload.
type buildStep struct {
	Type      string   `json:"type"`
	Args      []string `json:"args"`
	FilesHash string   `json:"filesHash"`
	Force     bool     `json:"force"`
	Upload    bool     `json:"forceUpload"`
	Links     bool     `json:"resolveSymlinks"`
	Gzip      *bool    `json:"gzip"`
}

var stepArgs = map[string]int{"RUN": 1, "COPY": 2, "ENV": 2, "WORKDIR": 1, "USER": 1}

// check refuses what cannot be done.
func (b *buildBody) check() error {
	switch {
	case (b.FromImage == "") == (b.FromTemplate == ""):
		return answers.Fail(http.StatusBadRequest, "use fromImage or fromTemplate")
	case !answers.Absent(b.Registry):
		return answers.Refused("fromImageRegistry", "the host has its own credentials of registries, as docker has them")
	case len(b.Steps) > maxSteps:
		return answers.Fail(http.StatusBadRequest, "steps: use at most %d", maxSteps)
	}
	for i, s := range b.Steps {
		least, ok := stepArgs[s.Type]
		switch {
		case !ok:
			return answers.Refused(fmt.Sprintf("type %q of step %d", s.Type, i+1), "use RUN, COPY, ENV, WORKDIR and USER")
		case len(s.Args) < least || s.Type == "ENV" && len(s.Args)%2 != 0:
			return answers.Fail(http.StatusBadRequest, "step %d: %s has too few args", i+1, s.Type)
		}
	}
	return nil
}

// Defaults are what a template gives its sandboxes. They are in the memory of its snapshot: the code of a template may
// change them as it may change its own files, and each sandbox of it has its own.
type Defaults struct {
	Env     map[string]string `json:"env,omitempty"`
	User    string            `json:"user,omitempty"`
	Workdir string            `json:"workdir,omitempty"`
}

const (
	defaultsFile = GuestDir + "/template.json"
	maxDefaults  = spec.MaxE2B
)

// ReadDefaults reads the defaults of a guest. One that is of no template has none.
func ReadDefaults(ctx context.Context, c *guest.Client) (d Defaults, err error) {
	var text bytes.Buffer
	if _, err := c.ReadFile(ctx, defaultsFile, &text, 0, maxDefaults); errors.Is(err, fs.ErrNotExist) {
		return d, nil
	} else if err != nil {
		return d, err
	}
	if json.Unmarshal(text.Bytes(), &d) != nil {
		return Defaults{}, nil // of the guest's own making
	}
	if !path.IsAbs(d.Workdir) || strings.ContainsRune(d.Workdir, 0) {
		d.Workdir = ""
	}
	return d, nil
}

// building is a build under way.
type building struct {
	*Templates
	*build
	body buildBody
	box  *sandbox.Sandbox
	c    *guest.Client
	Defaults
	accounts accounts.Accounts
}

// DefaultUser is who commands run as if neither a request nor a template chooses anybody and the guest has the user.
const DefaultUser = "user"

// Times of a build.
const (
	placeEvery = 200 * time.Millisecond // between two looks for a place
	endTime    = 10 * time.Minute       // for its sandbox to be removed
	readyTime  = 5 * time.Minute        // for the ready command to succeed
	readyEvery = time.Second            // between two tries of it
	startTime  = 20 * time.Second       // for a start command without a ready command, as E2B has it
)

// begins reports whether a build may begin: there are places of all, and of its owner.
func (t *Templates) begins(b *build) bool {
	t.mu.Lock()
	defer t.mu.Unlock()
	all, of := 0, 0
	for _, other := range t.building {
		if other.runs {
			all++
			if other.owner == b.owner {
				of++
			}
		}
	}
	b.runs = all < maxBuilding && (b.owner == "" || of < maxBuildingOf)
	return b.runs
}

func (t *Templates) ends(b *build) {
	t.mu.Lock()
	defer t.mu.Unlock()
	b.runs = false
}

// runBuild runs a build to its end.
func (t *Templates) runBuild(b *build, key tokens.Token, body buildBody) {
	for !t.begins(b) {
		if wait.For(t.life, placeEvery) != nil {
			b.set(buildError, &buildReason{Message: "the server ended before the build"})
			return
		}
	}
	defer t.ends(b)
	ctx, cancel := context.WithTimeout(t.life, buildTime)
	defer cancel()
	b.set(buildRunning, nil)
	run := &building{Templates: t, build: b, body: body}
	err := run.all(ctx, key)
	if run.box != nil {
		end, cancel := context.WithTimeout(context.WithoutCancel(ctx), endTime)
		defer cancel()
		if err := run.box.Delete(end, sandbox.DeleteOptions{Force: true}); err != nil && !errors.Is(err, sandbox.ErrNotFound) {
			t.o.Report("build", run.box.Name(), err)
		}
	}
	if err == nil {
		b.say("info", "", "Build finished")
		t.o.Log.Info("template built", "template", b.Template, "build", b.Build)
		b.set(buildReady, nil)
		return
	}
	reason := t.reasonOf("finalize", err)
	reason.Logs = []buildLog{{time.Now().UTC(), "error", reason.Message, reason.Step}}
	b.say("error", reason.Step, "%s", reason.Message)
	b.set(buildError, reason)
}

// reasonOf is why a build has failed at a step, with an error of the host if that is none of the build's own.
func (t *Templates) reasonOf(step string, err error) *buildReason {
	var reason *buildReason
	if errors.As(err, &reason) {
		return reason
	}
	e := t.o.ErrorOf(err)
	if e.Code >= http.StatusInternalServerError && t.life.Err() == nil {
		t.o.Report("build", "", cmp.Or(e.Cause, error(e)))
	}
	return &buildReason{Message: e.Message, Step: step}
}

// all does all of a build: the base, its steps, its start command, and its snapshot.
func (b *building) all(ctx context.Context, key tokens.Token) error {
	err := b.boot(ctx, key)
	if b.c != nil {
		defer b.c.Close()
	}
	if err != nil {
		return b.reasonOf("base", err)
	}
	for i, step := range b.body.Steps {
		b.say("info", strconv.Itoa(i+1), "[%d/%d] %s %s", i+1, len(b.body.Steps), step.Type, strings.Join(step.Args, " "))
		if err := b.step(ctx, strconv.Itoa(i+1), step); err != nil {
			var reason *buildReason
			if !errors.As(err, &reason) {
				reason = &buildReason{Message: fmt.Sprintf("%s: %s", step.Type, b.words(ctx, err))}
			}
			reason.Step = strconv.Itoa(i + 1)
			return reason
		}
	}
	if err := b.start(ctx); err != nil {
		return &buildReason{Message: b.words(ctx, err), Step: "finalize"}
	}
	data, err := json.Marshal(b.Defaults)
	if err != nil {
		return err
	}
	if len(data) > maxDefaults/2 {
		return &buildReason{Message: fmt.Sprintf("the variables of the template have %d bytes: use at most %d", len(data), maxDefaults/2), Step: "finalize"}
	}
	if err := b.c.Mkdir(ctx, GuestDir, 0, true); err != nil {
		return err
	}
	if err := b.c.WriteFile(ctx, defaultsFile, bytes.NewReader(data), guest.WriteOptions{Atomic: true}); err != nil {
		return err
	}
	return b.finish(ctx)
}

// words are the words of an error in a guest for the client.
func (b *building) words(ctx context.Context, err error) string {
	var reason *buildReason
	switch {
	case errors.As(err, &reason):
		return reason.Message
	case errors.Is(err, context.DeadlineExceeded) || ctx.Err() != nil:
		return "the build took too long, or the server ends"
	case errors.Is(err, guest.ErrConnectionLost) || errors.Is(err, guest.ErrUnavailable):
		return "the sandbox of the build has ended"
	}
	return err.Error()
}

// boot makes the sandbox that the steps run in. It is none of the wire: no list has it.
func (b *building) boot(ctx context.Context, key tokens.Token) error {
	snap, img, err := b.base(ctx, key)
	if err != nil {
		return err
	}
	m := &spec.Metadata{Owner: b.owner, Class: lifetime.Ephemeral, Expires: time.Now().Add(buildTime)}
	if b.box, err = b.o.Make(ctx, snap, img, b.size, m); err != nil {
		return err
	}
	if b.c, err = b.box.Agent(ctx); err != nil {
		return err
	}
	if b.accounts, err = accounts.Read(ctx, b.c); err != nil {
		return err
	}
	if snap != "" {
		if b.Defaults, err = ReadDefaults(ctx, b.c); err != nil {
			return err
		}
		b.say("warn", "base", "the sandboxes have the size of the template: cpuCount and memoryMB change nothing")
	}
	if b.Env == nil {
		b.Env = map[string]string{}
	}
	if _, err := b.c.Stat(ctx, "/bin/bash"); err != nil {
		return &buildReason{Message: "the base has no /bin/bash, which clients run commands with", Step: "base"}
	}
	return b.user(ctx, cmp.Or(b.User, DefaultUser), true)
}

// Images of E2B's own, and the templates of the host that stand for them.
var standIns = map[string]string{"e2bdev/base": "base", "e2bdev/code-interpreter": "code-interpreter-v1"}

// base returns the snapshot or the image that a build begins with.
func (b *building) base(ctx context.Context, key tokens.Token) (snap, img string, err error) {
	name := b.body.FromTemplate
	if name == "" {
		name = strings.TrimPrefix(strings.TrimPrefix(b.body.FromImage, "docker.io/"), "library/")
		repository, _, _ := strings.Cut(name, ":")
		if t, ok := standIns[repository]; ok {
			name = t
		} else if b.body.FromTemplate == "" {
			if _, ok := b.o.Names[name]; !ok {
				img, err = b.pulled(ctx, key, name)
				return "", img, err
			}
		}
	}
	if snap, err = b.Lookup(b.owner, name); snap != "" || err != nil {
		return snap, "", err
	}
	img, err = b.Image(name)
	return "", img, err
}

// pulled returns an image of the host. A key that may do so has the host fetch one that is missing.
func (b *building) pulled(ctx context.Context, key tokens.Token, name string) (string, error) {
	tag, _, _ := strings.Cut(name, "@")
	if _, err := image.NormalizeTag(tag); err != nil {
		return "", &buildReason{Message: fmt.Sprintf("fromImage %.200q is not the name of an image", name), Step: "base"}
	}
	images, err := image.OpenStore(b.o.Host.State.ImageDir())
	if err != nil {
		return "", err
	}
	_, err = images.Find(name)
	switch {
	case err == nil:
		return name, nil
	case !errors.Is(err, image.ErrNotFound) && !errors.Is(err, image.ErrAmbiguous):
		return "", err
	case b.o.Pull == nil || !mayPull(key):
		return "", &buildReason{Message: fmt.Sprintf("the image %s is not on the host: pull it there with `drowse pull %s`, or build with a key that has the scope admin", name, name), Step: "base"}
	}
	b.say("info", "base", "pulling %s", name)
	if err := b.o.Pull(ctx, name); err != nil {
		return "", &buildReason{Message: fmt.Sprintf("the image %s could not be pulled: %v", name, err), Step: "base"}
	}
	return name, nil
}

// logger makes lines of a log of a command's output.
func (b *building) logger(level, step string) (io.Writer, func()) {
	r, w := io.Pipe()
	done := make(chan struct{})
	go func() {
		defer close(done)
		lines := bufio.NewReaderSize(r, maxLogLine)
		for {
			line, err := lines.ReadSlice('\n')
			if line = bytes.TrimRight(line, "\r\n"); len(line) > 0 {
				b.say(level, step, "%s", line)
			}
			if err != nil && !errors.Is(err, bufio.ErrBufferFull) {
				return
			}
		}
	}()
	return w, func() {
		_ = w.Close()
		<-done
	}
}

// command returns a command of the template's shell.
func (b *building) command(script, user string) (guest.Cmd, error) {
	u, ok := b.accounts.Find(user)
	if !ok {
		return guest.Cmd{}, &buildReason{Message: fmt.Sprintf("failed to run command '%s': command failed: unauthenticated: invalid username: '%s'", script, user)}
	}
	cmd := guest.Cmd{Argv: []string{"/bin/bash", "-l", "-c", script}, User: u.Name, Dir: cmp.Or(b.Workdir, u.Home)}
	for _, k := range slices.Sorted(maps.Keys(b.Env)) {
		cmd.Env = append(cmd.Env, k+"="+b.Env[k])
	}
	return b.box.Command(cmd)
}

// run runs a command as a step.
func (b *building) run(ctx context.Context, step, script, user string) error {
	cmd, err := b.command(script, user)
	if err != nil {
		return err
	}
	var ends [2]func()
	cmd.Stdout, ends[0] = b.logger("info", step)
	cmd.Stderr, ends[1] = b.logger("error", step)
	st, err := b.c.Exec(ctx, cmd)
	ends[0]()
	ends[1]()
	var exit *guest.ExitError
	if errors.As(err, &exit) && st != nil {
		return &buildReason{Message: fmt.Sprintf("failed to run command '%s': %s", script, st)}
	}
	return err
}

func (b *building) step(ctx context.Context, n string, step buildStep) error {
	arg := func(i int) string {
		if i < len(step.Args) {
			return step.Args[i]
		}
		return ""
	}
	switch step.Type {
	case "RUN":
		return b.run(ctx, n, arg(0), cmp.Or(arg(1), b.User))
	case "ENV":
		for i := 0; i < len(step.Args); i += 2 {
			k := step.Args[i]
			if k == "" || strings.ContainsAny(k, "=\x00") || strings.ContainsRune(step.Args[i+1], 0) {
				return &buildReason{Message: fmt.Sprintf("ENV: %q cannot be a variable", k)}
			}
			v, err := b.expand(ctx, step.Args[i+1])
			if err != nil {
				return err
			}
			b.Env[k] = v
		}
		return nil
	case "WORKDIR":
		dir, err := b.expand(ctx, arg(0))
		if err != nil {
			return err
		}
		u, _ := b.accounts.Find(b.User)
		u.Dir = b.Workdir
		if dir, err = u.Path(dir); err != nil {
			return err
		}
		b.Workdir = dir
		return b.c.MkdirFor(ctx, dir, *u.Owner())
	case "USER":
		name, _, _ := strings.Cut(arg(0), ":")
		return b.user(ctx, name, arg(1) == "true")
	}
	return b.copy(ctx, step.FilesHash, arg(0), arg(1), arg(2), arg(3))
}

// expand has the shell insert variables into a value, as between double quotes.
func (b *building) expand(ctx context.Context, value string) (string, error) {
	if !strings.ContainsAny(value, "$`\\") {
		return value, nil
	}
	cmd, err := b.command(`printf %s "`+strings.ReplaceAll(value, `"`, `\"`)+`"`, "root")
	if err != nil {
		return "", err
	}
	var out limited
	cmd.Stdout = &out
	st, err := b.c.Exec(ctx, cmd)
	var exit *guest.ExitError
	if errors.As(err, &exit) && st != nil {
		return "", &buildReason{Message: fmt.Sprintf("the variables in %.200q cannot be inserted: %s", value, st)}
	}
	return strings.ToValidUTF8(out.String(), ""), err
}

// limited keeps as much of an output as a variable may have.
type limited struct{ bytes.Buffer }

// Write implements io.Writer.
func (l *limited) Write(p []byte) (int, error) {
	l.Buffer.Write(p[:min(len(p), max(0, maxDefaults-l.Len()))])
	return len(p), nil
}

var userRE = lazyregexp.New(`^[a-z_][a-z0-9_-]{0,31}$`)

// user makes a user the default one, and makes it if there is none.
func (b *building) user(ctx context.Context, name string, sudo bool) error {
	if uid, err := strconv.Atoi(name); err == nil {
		name = b.accounts.User(uid)
	}
	if _, ok := b.accounts.Find(name); ok {
		b.User = name
		return nil
	}
	if !userRE.MatchString(name) {
		return &buildReason{Message: fmt.Sprintf("%.64q cannot be the name of a user", name)}
	}
	id := 1000
	for b.accounts.User(id) != strconv.Itoa(id) || b.accounts.Group(id) != strconv.Itoa(id) {
		id++
	}
	home := "/home/" + name
	// Without a password, and without an entry in shadow(5), which then is not asked.
	for file, line := range map[string]string{
		"/etc/passwd": fmt.Sprintf("%s:*:%d:%d::%s:/bin/bash\n", name, id, id, home), "/etc/group": fmt.Sprintf("%s:x:%d:\n", name, id),
	} {
		if err := b.append(ctx, file, line); err != nil {
			return err
		}
	}
	if err := b.c.MkdirFor(ctx, home, guest.Owner{UID: id, GID: id}); err != nil {
		return err
	}
	if fi, err := b.c.Stat(ctx, "/etc/sudoers.d"); sudo && err == nil && fi.Mode.IsDir() {
		rule := strings.NewReader(name + " ALL=(ALL:ALL) NOPASSWD: ALL\n")
		if err := b.c.WriteFile(ctx, "/etc/sudoers.d/"+name, rule, guest.WriteOptions{Perm: 0o440, Atomic: true}); err != nil {
			return err
		}
	}
	var err error
	b.accounts, err = accounts.Read(ctx, b.c)
	b.User = name
	return err
}

// append adds a line to a file, after the end of its last line.
func (b *building) append(ctx context.Context, file, line string) error {
	fi, err := b.c.Stat(ctx, file)
	if err == nil && fi.Size > 0 {
		var last bytes.Buffer
		if _, err := b.c.ReadFile(ctx, file, &last, fi.Size-1, 1); err != nil {
			return err
		}
		if last.String() != "\n" {
			line = "\n" + line
		}
	}
	return b.c.WriteFile(ctx, file, strings.NewReader(line), guest.WriteOptions{Append: true})
}

// fixed returns the directories of a pattern before the first that has a wildcard.
func fixed(pattern string) string {
	var out []string
	for part := range strings.SplitSeq(path.Clean(pattern), "/") {
		if strings.ContainsAny(part, "*?[{\\") {
			break
		}
		out = append(out, part)
	}
	return cmp.Or(strings.Join(out, "/"), ".")
}

// copy copies uploaded files: one to the name dest, or what is in a directory to the directory dest.
func (b *building) copy(ctx context.Context, hash, src, dest, owner, mode string) error {
	open, err := b.files(hash)
	if err != nil {
		return err
	}
	defer open.Close()
	u, err := b.ownedBy(cmp.Or(owner, b.User))
	if err != nil {
		return err
	}
	perm := int64(-1)
	if mode != "" {
		if perm, err = strconv.ParseInt(mode, 8, 32); err != nil || perm < 0 || perm > 0o7777 {
			return &buildReason{Message: fmt.Sprintf("COPY: the mode %.20q is not one", mode)}
		}
	}
	me, _ := b.accounts.Find(b.User)
	me.Dir = b.Workdir
	target, err := me.Path(dest)
	if err != nil {
		return err
	}
	from := fixed(src)
	single := false
	if err := each(ctx, open.reader(), maxCopied, func(h *tar.Header, _ io.Reader) error {
		single = single || path.Clean(h.Name) == from && h.Typeflag != tar.TypeDir
		return nil
	}); err != nil {
		return err
	}
	name := func(n string) (string, bool) { // below target
		if from == "." {
			return n, n != "."
		}
		return strings.CutPrefix(n, from+"/")
	}
	if single {
		if fi, err := b.c.Stat(ctx, target); strings.HasSuffix(dest, "/") || err == nil && fi.Mode.IsDir() {
			target = path.Join(target, path.Base(from))
		}
		is := path.Base(target)
		name = func(n string) (string, bool) { return is, n == from }
		target = path.Dir(target)
	}
	if err := b.c.MkdirFor(ctx, target, u); err != nil {
		return err
	}
	r, w := io.Pipe()
	done := make(chan struct{})
	go func() {
		defer close(done)
		out := tar.NewWriter(w)
		err := each(ctx, open.reader(), maxCopied, func(h *tar.Header, content io.Reader) error {
			to, ok := name(path.Clean(h.Name))
			if !ok {
				return nil
			}
			h.Name, h.Uname, h.Gname = to, "", ""
			if h.Typeflag == tar.TypeLink {
				if h.Linkname, ok = name(path.Clean(h.Linkname)); !ok {
					return &buildReason{Message: "COPY: a hard link leads out of what is copied"}
				}
			}
			if perm >= 0 && h.Typeflag != tar.TypeSymlink {
				h.Mode = perm
			}
			if err := out.WriteHeader(h); err != nil {
				return err
			}
			_, err := io.Copy(out, content)
			return err
		})
		_ = w.CloseWithError(errors.Join(err, out.Close()))
	}()
	_, err = b.c.UnpackTree(ctx, target, r, guest.CopyOptions{Owner: &u, MaxBytes: maxCopied})
	_ = r.CloseWithError(context.Canceled)
	<-done
	return err
}

// maxCopied bounds what the files of a step have when they are unpacked, in bytes.
const maxCopied = 8 << 30

// unpacking bounds what is unpacked of an upload. It ends with its context: what has no end holds up no build.
type unpacking struct {
	ctx  context.Context
	r    io.Reader
	left int64
}

// Read implements io.Reader.
func (u *unpacking) Read(p []byte) (int, error) {
	n, err := u.r.Read(p)
	if u.left -= int64(n); u.left < 0 {
		return 0, &buildReason{Message: "COPY: the uploaded files unpack to too many bytes"}
	}
	return n, cmp.Or(u.ctx.Err(), err)
}

// each calls f for each entry of an upload, whose names stay in the tree, and which unpacks to so many bytes at most.
func each(ctx context.Context, r io.Reader, most int64, f func(*tar.Header, io.Reader) error) error {
	in := bufio.NewReader(r)
	var stream io.Reader = in
	if magic, _ := in.Peek(2); bytes.Equal(magic, []byte{0x1f, 0x8b}) {
		z, err := gzip.NewReader(in)
		if err != nil {
			return &buildReason{Message: "COPY: the uploaded files are not a tar stream"}
		}
		defer z.Close()
		stream = z
	}
	t := tar.NewReader(&unpacking{ctx, stream, most})
	for n := 0; ; n++ {
		h, err := t.Next()
		var reason *buildReason
		switch {
		case errors.Is(err, io.EOF) && n > 0:
			return nil
		case errors.As(err, &reason), err != nil && ctx.Err() != nil:
			return err
		case err != nil:
			return &buildReason{Message: "COPY: the uploaded files are not a tar stream, or none"}
		}
		if !filepath.IsLocal(h.Name) {
			return &buildReason{Message: fmt.Sprintf("COPY: the name %.200q leads out of the tree", h.Name)}
		}
		switch h.Typeflag {
		case tar.TypeReg, tar.TypeDir, tar.TypeSymlink, tar.TypeLink:
		default:
			continue
		}
		if err := f(h, t); err != nil {
			return err
		}
	}
}

// held is an upload that stays open.
type held struct {
	*os.File
	size int64
}

func (h held) reader() io.Reader { return io.NewSectionReader(h.File, 0, h.size) }

// files returns the upload of a step. It stays if another one replaces it meanwhile.
func (b *building) files(hash string) (held, error) {
	b.Templates.mu.Lock()
	defer b.Templates.mu.Unlock()
	u := b.uploadOf(b.Template, hash)
	if hash == "" || u == nil || u.file == nil {
		return held{}, &buildReason{Message: "COPY: the files of the step were not uploaded"}
	}
	fd, err := unix.FcntlInt(u.file.Fd(), unix.F_DUPFD_CLOEXEC, 0)
	if err != nil {
		return held{}, err
	}
	return held{os.NewFile(uintptr(fd), "upload"), u.size}, nil
}

// ownedBy returns the owner that USER or USER:GROUP names.
func (b *building) ownedBy(name string) (guest.Owner, error) {
	user, group, _ := strings.Cut(name, ":")
	u, ok := b.accounts.Find(user)
	if uid, err := strconv.Atoi(user); !ok && err == nil {
		u, ok = accounts.Account{UID: uid, GID: uid}, true
	}
	if !ok {
		return guest.Owner{}, &buildReason{Message: fmt.Sprintf("COPY: invalid username: '%.64s'", user)}
	}
	if group == "" {
		return *u.Owner(), nil
	}
	gid, ok := b.accounts.FindGroup(group)
	if n, err := strconv.Atoi(group); !ok && err == nil {
		gid, ok = n, true
	}
	if !ok {
		return guest.Owner{}, &buildReason{Message: fmt.Sprintf("COPY: the group '%.64s' is not there", group)}
	}
	return guest.Owner{UID: u.UID, GID: gid}, nil
}

// keptOutput is how many bytes of output the agent keeps of it.
const keptOutput = 64 << 10

// startTag is the tag of the process of a start command.
const startTag = "start_cmd"

// start starts what the sandboxes of the template are to have running, and waits until it is ready.
func (b *building) start(ctx context.Context) error {
	if b.body.StartCmd != "" {
		cmd, err := b.command(b.body.StartCmd, b.User)
		if err != nil {
			return err
		}
		tag := startTag
		if cmd.ID, err = b.o.Process(&tag); err != nil {
			return err
		}
		cmd.Detach, cmd.OutputLimit, cmd.NoStdin = true, keptOutput, true
		var ends [2]func()
		cmd.Stdout, ends[0] = b.logger("info", "finalize")
		cmd.Stderr, ends[1] = b.logger("error", "finalize")
		b.say("info", "finalize", "[start] %s", b.body.StartCmd)
		follow, leave := context.WithCancel(ctx)
		session, err := b.c.Start(follow, cmd)
		if err != nil {
			leave()
			ends[0]()
			ends[1]()
			return err
		}
		defer func() {
			leave()
			<-session.Done()
			ends[0]()
			ends[1]()
		}()
	}
	switch {
	case b.body.ReadyCmd != "":
	case b.body.StartCmd != "":
		return wait.For(ctx, startTime)
	default:
		return nil
	}
	b.say("info", "finalize", "[ready] %s", b.body.ReadyCmd)
	for end := time.Now().Add(readyTime); ; {
		err := b.run(ctx, "finalize", b.body.ReadyCmd, b.User)
		if err == nil || ctx.Err() != nil {
			return err
		}
		if time.Now().After(end) {
			return &buildReason{Message: fmt.Sprintf("the template is not ready after %v: %s", readyTime, b.words(ctx, err))}
		}
		if err := wait.For(ctx, readyEvery); err != nil {
			return err
		}
	}
}

// finish makes the template.
func (b *building) finish(ctx context.Context) error {
	res, err := b.box.Snapshot(ctx, sandbox.SnapshotOptions{Note: "of a template of E2B's wire"})
	if err != nil {
		return err
	}
	b.tagging.Lock()
	defer b.tagging.Unlock()
	// With its tags at once: whatever happens before others have lost them, the newest counts.
	if _, err := b.o.Host.State.TagSnapshot(res.Snapshot, b.tags(b.owner)); err != nil {
		return err
	}
	return b.move(ctx, b.owner, b.Template, b.Build, b.Versions)
}
