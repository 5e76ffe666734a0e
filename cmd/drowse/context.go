package main

import (
	"cmp"
	"crypto/rand"
	"crypto/tls"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"maps"
	"net/http"
	"net/netip"
	"net/url"
	"os"
	"path/filepath"
	"regexp"
	"runtime"
	"slices"
	"strings"

	"github.com/spf13/cobra"
)

// localName is the name of the state directory of this host, where a context could be named.
const localName = "local"

// A serverContext is a named server.
type serverContext struct {
	URL          string `json:"url"`
	Token        string `json:"token,omitempty"`
	InsecureHTTP bool   `json:"insecure_http,omitempty"`
	credentials
}

// credentials are files that are read again when they are used: tokens and certificates of short life are replaced.
type credentials struct {
	TokenFile  string `json:"token_file,omitempty"`
	ClientCert string `json:"client_cert,omitempty"`
	ClientKey  string `json:"client_key,omitempty"`
}

// check checks credentials beside a token, whose sources have these names.
func (c *credentials) check(token string, names [4]string) error {
	switch {
	case token != "" && c.TokenFile != "":
		return usageError{fmt.Errorf("%s does not go with %s", names[0], names[1])}
	case (c.ClientCert == "") != (c.ClientKey == ""):
		return usageError{fmt.Errorf("%s goes with %s", names[2], names[3])}
	}
	return nil
}

// token reads the token.
func (c *credentials) token() (string, error) {
	f, err := os.Open(c.TokenFile)
	if err != nil {
		return "", fmt.Errorf("the token: %w", err)
	}
	defer f.Close()
	text, err := io.ReadAll(io.LimitReader(f, maxToken+1))
	if err != nil {
		return "", fmt.Errorf("the token: %w", err)
	}
	token := strings.TrimSpace(string(text))
	if !isToken(token) || len(text) > maxToken {
		return "", fmt.Errorf("%s has no token", c.TokenFile)
	}
	return token, nil
}

// isToken reports whether a text can be sent as a token.
func isToken(text string) bool {
	return text != "" && len(text) <= maxToken && !strings.ContainsFunc(text, func(r rune) bool { return r <= ' ' || r > '~' })
}

// certificate reads the client certificate.
func (c *credentials) certificate(*tls.CertificateRequestInfo) (*tls.Certificate, error) {
	pair, err := tls.LoadX509KeyPair(c.ClientCert, c.ClientKey)
	if err != nil {
		return nil, fmt.Errorf("the client certificate: %w", err)
	}
	return &pair, nil
}

// withToken sends the token of a file with each request.
type withToken struct {
	*http.Transport
	of credentials
}

func (w withToken) RoundTrip(r *http.Request) (*http.Response, error) {
	token, err := w.of.token()
	if err != nil {
		if r.Body != nil {
			r.Body.Close()
		}
		return nil, err
	}
	r = r.Clone(r.Context())
	r.Header.Set("Authorization", "Bearer "+token)
	return w.Transport.RoundTrip(r)
}

// contexts is the file of a user's contexts.
type contexts struct {
	Current  string                   `json:"current,omitempty"`
	Contexts map[string]serverContext `json:"contexts"`
}

// maxContexts bounds the file, in bytes, and maxToken a token.
const (
	maxContexts = 1 << 20
	maxToken    = 16 << 10
)

var contextName = regexp.MustCompile(`^[a-z0-9][a-z0-9._-]{0,62}$`)

// contextsPath returns the path of the user's contexts.
func contextsPath() (string, error) {
	dir, err := os.UserConfigDir()
	if err != nil {
		return "", fmt.Errorf("finding the contexts: %w", err)
	}
	return filepath.Join(dir, "drowse", "contexts.json"), nil
}

// readContexts reads the user's contexts. A user without a file, or without a home, has none.
func readContexts() (c contexts, err error) {
	c.Contexts = map[string]serverContext{}
	path, err := contextsPath()
	if err != nil {
		return c, nil //nolint:nilerr // a service may have no home
	}
	f, err := os.Open(path)
	if errors.Is(err, fs.ErrNotExist) {
		return c, nil
	}
	if err != nil {
		return c, fmt.Errorf("reading the contexts: %w", err)
	}
	defer f.Close()
	fi, err := f.Stat()
	if err != nil {
		return c, fmt.Errorf("reading the contexts: %w", err)
	}
	if runtime.GOOS != "windows" && fi.Mode().Perm()&0o077 != 0 {
		return c, fmt.Errorf("reading the contexts: others have access to %s, which has tokens: use `chmod 600`", path)
	}
	text, err := io.ReadAll(io.LimitReader(f, maxContexts+1))
	if err == nil && len(text) > maxContexts {
		err = fmt.Errorf("it has more than %d bytes", maxContexts)
	}
	if err == nil && json.Unmarshal(text, &c) != nil {
		err = errors.New("it is not JSON of `drowse context`") // the cause would quote a token
	}
	if err != nil {
		return c, fmt.Errorf("reading the contexts in %s: %w", path, err)
	}
	if c.Contexts == nil {
		c.Contexts = map[string]serverContext{}
	}
	return c, nil
}

// write replaces the user's contexts.
func (c contexts) write() (err error) {
	defer func() {
		if err != nil {
			err = fmt.Errorf("writing the contexts: %w", err)
		}
	}()
	path, err := contextsPath()
	if err != nil {
		return err
	}
	text, err := json.MarshalIndent(c, "", "  ")
	if err != nil {
		return err
	}
	if err := os.MkdirAll(filepath.Dir(path), 0o700); err != nil {
		return err
	}
	return replaceFile(path, 0o600, func(f *os.File) error {
		_, err := f.Write(append(text, '\n'))
		return err
	})
}

// replaceFile writes a file, which has its name only when it is complete: after a crash it is the old or the new one.
// Package osfile, which does so elsewhere, is for Linux.
func replaceFile(path string, perm os.FileMode, write func(*os.File) error) error {
	temp := filepath.Join(filepath.Dir(path), ".tmp-"+rand.Text()[:16])
	f, err := os.OpenFile(temp, os.O_RDWR|os.O_CREATE|os.O_EXCL, 0o600)
	if err != nil {
		return err
	}
	err = write(f)
	if err == nil {
		err = f.Sync()
	}
	if err == nil && runtime.GOOS != "windows" {
		err = f.Chmod(perm)
	}
	if err = errors.Join(err, f.Close()); err == nil {
		err = os.Rename(temp, path)
	}
	if err != nil {
		return errors.Join(err, os.Remove(temp))
	}
	if runtime.GOOS == "windows" {
		return nil // directories cannot be synced there
	}
	d, err := os.Open(filepath.Dir(path))
	if err != nil {
		return err
	}
	return errors.Join(d.Sync(), d.Close())
}

// get returns a context by name.
func (c contexts) get(name string) (serverContext, error) {
	s, ok := c.Contexts[name]
	if !ok {
		return s, fmt.Errorf("there is no context %.64q: see `drowse context ls`, or use a URL as https://HOST:7300", name)
	}
	return s, nil
}

// parseServer checks the URL of a server. Its errors do not quote it, since it might have a password.
func parseServer(text string, insecureHTTP bool) (*url.URL, error) {
	u, err := url.Parse(text)
	switch {
	case err != nil:
		return nil, usageError{errors.New("the host is no URL: use one as https://HOST:7300")}
	case u.User != nil:
		return nil, usageError{errors.New("the host's URL has a user or a password: leave it out, and give a token by $DROWSE_TOKEN or `drowse context add --token-file`")}
	case u.RawQuery != "" || u.Fragment != "" || u.ForceQuery:
		return nil, usageError{errors.New("the host's URL has a query or a fragment: leave it out")}
	case u.Scheme == "unix" && u.Host == "" && filepath.IsAbs(u.Path):
		return u, nil
	case u.Scheme != "https" && u.Scheme != "http" || u.Hostname() == "":
		return nil, usageError{errors.New("the host's URL has another form: use https://HOST:PORT, http://localhost:PORT or unix:///PATH")}
	case u.Scheme == "http" && !insecureHTTP && !isLoopback(u.Hostname()):
		return nil, usageError{fmt.Errorf("http to %s would show the token and all data to the network: use https, or --insecure-http if another layer encrypts", u.Host)}
	}
	return u, nil
}

func isLoopback(host string) bool {
	a, err := netip.ParseAddr(host)
	return host == "localhost" || err == nil && a.Unmap().IsLoopback()
}

// origin is a server, without what may differ between its pages.
func origin(u *url.URL) string {
	port := u.Port()
	if port == "" {
		port = map[string]string{"https": "443", "http": "80"}[u.Scheme]
	}
	return u.Scheme + "://" + strings.ToLower(u.Hostname()) + ":" + port + map[bool]string{true: u.Path}[u.Scheme == "unix"]
}

// hostFlags say where the VMs are. They stand before the command, since behind it all words may be a guest's.
type hostFlags struct {
	host     string // a URL, the name of a context, or localName
	insecure bool
}

const (
	hostFlag     = "host"
	insecureFlag = "insecure-http"
)

// add adds the flags to the help and to completion; take reads them.
func (h *hostFlags) add(root *cobra.Command) {
	f := root.Flags()
	f.String(hostFlag, "", "URL or context of a \"drowse serve\" to work with, or \""+localName+"\"; stands before the command ($DROWSE_HOST, with $DROWSE_TOKEN or $DROWSE_TOKEN_FILE)")
	f.Bool(insecureFlag, false, "with --host: allow http to other machines")
	_ = root.RegisterFlagCompletionFunc(hostFlag, func(*cobra.Command, []string, string) ([]string, cobra.ShellCompDirective) {
		c, _ := readContexts()
		return append(slices.Sorted(maps.Keys(c.Contexts)), localName), cobra.ShellCompDirectiveNoFileComp
	})
}

// take takes the flags from the front of a command line: before the first word that is no flag of the root.
func (h *hostFlags) take(args []string) ([]string, error) {
	var rest []string
	for i := 0; i < len(args); i++ {
		w := args[i]
		value, is := strings.CutPrefix(w, "--"+hostFlag+"=")
		switch {
		case i == 0 && (w == cobra.ShellCompRequestCmd || w == cobra.ShellCompNoDescRequestCmd):
			rest = append(rest, w)
		case is:
			h.host = value
		case w == "--"+hostFlag:
			if i+1 == len(args) {
				return append(rest, w), nil // being completed, or cobra says what is missing
			}
			if i++; i+1 == len(args) && len(rest) > 0 && strings.HasPrefix(rest[0], cobra.ShellCompRequestCmd) {
				return append(rest, w, args[i]), nil // its value is being completed
			}
			if h.host = args[i]; h.host == "" {
				return nil, usageError{errors.New("--host is empty: use a URL as https://HOST:7300, or a context")}
			}
		case w == "--"+insecureFlag || w == "--"+insecureFlag+"=true":
			h.insecure = true
		case w == "-o" || w == "--output" || w == "--state":
			rest = append(rest, args[i:min(i+2, len(args))]...)
			i++
		case strings.HasPrefix(w, "-") && w != "-" && w != "--":
			rest = append(rest, w)
		default:
			return append(rest, args[i:]...), nil
		}
	}
	return rest, nil
}

// server is where and how to ask a server.
type server struct {
	url   *url.URL
	token string
	name  string // of its context, or ""
	credentials
}

// server returns the server to work with, or nil for the state directory of this host. In this order count --host,
// --state, $DROWSE_HOST, $DROWSE_STATE and the current context.
func (a *app) server() (*server, error) {
	if !a.resolved {
		a.at, a.atErr = a.resolve()
		a.resolved = true
	}
	return a.at, a.atErr
}

func (a *app) resolve() (*server, error) {
	env := os.Getenv("DROWSE_HOST")
	where := a.host.host
	if where != "" && a.stateGiven {
		return nil, usageError{errors.New("--host does not go with --state, which is a directory of this host")}
	}
	if where == "" && a.stateGiven {
		return nil, nil
	}
	if where = cmp.Or(where, env); where == localName || where == "" && os.Getenv("DROWSE_STATE") != "" {
		return nil, nil
	}
	s := &server{}
	insecure := a.host.insecure
	if where == "" || !strings.Contains(where, ":") {
		all, err := readContexts()
		if err != nil {
			return nil, err
		}
		if where = cmp.Or(where, all.Current); where == "" {
			return nil, nil
		}
		c, err := all.get(where)
		if err != nil {
			return nil, usageError{err}
		}
		s.name, s.token, s.credentials, insecure, where = where, c.Token, c.credentials, insecure || c.InsecureHTTP, c.URL
	}
	var err error
	if s.url, err = parseServer(where, insecure); err != nil {
		return nil, err
	}
	// $DROWSE_TOKEN and its like are for $DROWSE_HOST, or for what --host names if that is not set. They go nowhere else.
	if s.name == "" {
		mine := env == "" || a.host.host == ""
		if u, err := url.Parse(env); !mine && err == nil {
			mine = origin(u) == origin(s.url)
		}
		if mine {
			s.token = os.Getenv("DROWSE_TOKEN")
			s.credentials = credentials{os.Getenv("DROWSE_TOKEN_FILE"), os.Getenv("DROWSE_CLIENT_CERT"), os.Getenv("DROWSE_CLIENT_KEY")}
			if err := s.check(s.token, [4]string{"$DROWSE_TOKEN", "$DROWSE_TOKEN_FILE", "$DROWSE_CLIENT_CERT", "$DROWSE_CLIENT_KEY"}); err != nil {
				return nil, err
			}
		}
	}
	if s.token != "" && !isToken(s.token) {
		return nil, usageError{errors.New("the token has characters that no token has: see `drowse token create`")}
	}
	return s, nil
}

// String names the server for messages.
func (s *server) String() string { return s.url.String() }

func (a *app) contextCommand() *cobra.Command {
	return group(&cobra.Command{
		Use: "context", Short: "Name servers, and choose the one to work with",
		Long: `Name servers ("drowse serve" with the HTTP API on TCP), and choose the one to work with. --host
takes such a name as well as a URL. "` + localName + `" is the state directory of this host. The file of
contexts has their tokens, and is readable for its owner alone.`,
	}, a.contextAddCommand(), a.contextListCommand(), a.contextUseCommand(), a.contextShowCommand(), a.contextRemoveCommand())
}

// contextRow is a context as it is shown: never with its token.
type contextRow struct {
	Name    string `json:"name"`
	URL     string `json:"url"`
	Token   bool   `json:"token"` // there is one
	Cert    bool   `json:"client_cert,omitempty"`
	HTTP    bool   `json:"insecure_http,omitempty"`
	Current bool   `json:"current"`
}

func (c contexts) row(name string) contextRow {
	s := c.Contexts[name]
	return contextRow{name, s.URL, s.Token != "" || s.TokenFile != "", s.ClientCert != "", s.InsecureHTTP, name == c.Current}
}

func (a *app) contextAddCommand() *cobra.Command {
	var tokenFile string
	var insecure, use bool
	var files credentials
	cmd := &cobra.Command{
		Use: "add NAME URL", Short: "Add a context, or replace it", Args: cobra.ExactArgs(2), ValidArgsFunction: cobra.NoFileCompletions,
		Example: `  drowse context add --token-file token.txt --use prod https://vms.example.com:7300
  drowse context add here unix:///var/lib/drowse/api.sock`,
		RunE: func(_ *cobra.Command, args []string) error {
			name, where := args[0], args[1]
			if !contextName.MatchString(name) || name == localName {
				return usageError{fmt.Errorf("the name %.64q: use lower-case letters, digits, dots and dashes, at most 63, and not %s", name, localName)}
			}
			if _, err := parseServer(where, insecure); err != nil {
				return err
			}
			all, err := readContexts()
			if err != nil {
				return err
			}
			if err := files.check(tokenFile, [4]string{"--token-file", "--token-from", "--client-cert", "--client-key"}); err != nil {
				return err
			}
			for _, path := range []*string{&files.TokenFile, &files.ClientCert, &files.ClientKey} {
				if *path == "" {
					continue
				}
				if *path, err = filepath.Abs(*path); err != nil {
					return err
				}
			}
			s := serverContext{URL: where, InsecureHTTP: insecure, credentials: files}
			if tokenFile != "" {
				text, err := readInput("the token", tokenFile, os.Stdin, maxToken)
				if err != nil {
					return err
				}
				s.Token = strings.TrimSpace(string(text))
				if !isToken(s.Token) || len(text) > maxToken {
					return errors.New("the file has no token: see `drowse token create`")
				}
			}
			all.Contexts[name] = s
			if use {
				all.Current = name
			}
			err = all.write()
			return a.answer(all.row(name), err, func(w io.Writer) { fmt.Fprintln(w, name) })
		},
	}
	f := cmd.Flags()
	f.StringVar(&tokenFile, "token-file", "", "file with the token for the server, - for stdin (default: no token)")
	f.StringVar(&files.TokenFile, "token-from", "", "file with the token, read again for each request")
	f.StringVar(&files.ClientCert, "client-cert", "", "certificate to show to the server, PEM; read again for each connection")
	f.StringVar(&files.ClientKey, "client-key", "", "key of the certificate, PEM")
	f.BoolVar(&insecure, insecureFlag, false, "allow http to other machines")
	f.BoolVar(&use, "use", false, "work with it from now on")
	return cmd
}

func (a *app) contextListCommand() *cobra.Command {
	return &cobra.Command{
		Use: "ls", Short: "List contexts", Args: cobra.NoArgs,
		RunE: func(*cobra.Command, []string) error {
			all, err := readContexts()
			var rows []contextRow
			for _, name := range slices.Sorted(maps.Keys(all.Contexts)) {
				rows = append(rows, all.row(name))
			}
			return answerList(a, rows, err, "NAME\tURL\tTOKEN\tIN USE", func(r contextRow) []any {
				yes := map[bool]string{true: "yes", false: "-"}
				return []any{r.Name, r.URL, yes[r.Token], yes[r.Current]}
			})
		},
	}
}

func (a *app) contextUseCommand() *cobra.Command {
	return &cobra.Command{
		Use: "use NAME", Short: "Work with a context from now on, or with \"" + localName + "\"", Args: cobra.ExactArgs(1), ValidArgsFunction: a.firstArg(completeContext),
		RunE: func(_ *cobra.Command, args []string) error {
			all, err := readContexts()
			if err != nil {
				return err
			}
			if all.Current = args[0]; args[0] == localName {
				all.Current = ""
			} else if _, err := all.get(args[0]); err != nil {
				return err
			}
			for _, name := range []string{"DROWSE_HOST", "DROWSE_STATE"} {
				if os.Getenv(name) != "" {
					a.log.Warn("$" + name + " is set, and counts more than the context")
				}
			}
			err = all.write()
			return a.answer(map[string]string{"current": args[0]}, err, func(w io.Writer) { fmt.Fprintln(w, args[0]) })
		},
	}
}

func (a *app) contextShowCommand() *cobra.Command {
	return &cobra.Command{
		Use: "show [NAME]", Short: "Show a context, or the one in use, without its token", Args: cobra.MaximumNArgs(1), ValidArgsFunction: a.firstArg(completeContext),
		RunE: func(_ *cobra.Command, args []string) error {
			all, err := readContexts()
			if err != nil {
				return err
			}
			name := all.Current
			if len(args) > 0 {
				name = args[0]
			}
			if name == "" || name == localName {
				return a.print(contextRow{Name: localName, URL: "", Current: all.Current == ""}, func(w io.Writer) { fmt.Fprintln(w, localName) })
			}
			if _, err := all.get(name); err != nil {
				return err
			}
			r := all.row(name)
			return a.print(r, func(w io.Writer) {
				t := columns(w)
				defer t.Flush()
				fmt.Fprintf(t, "name\t%s\nURL\t%s\ntoken\t%s\nin use\t%s\n", r.Name, r.URL, map[bool]string{true: "set", false: "none"}[r.Token], map[bool]string{true: "yes", false: "no"}[r.Current])
			})
		},
	}
}

func (a *app) contextRemoveCommand() *cobra.Command {
	return &cobra.Command{
		Use: "rm NAME...", Short: "Remove contexts with their tokens", Args: cobra.MinimumNArgs(1), ValidArgsFunction: completeContext,
		RunE: func(_ *cobra.Command, args []string) error {
			all, err := readContexts()
			if err != nil {
				return err
			}
			return removeAll(a, args, func(name string) (string, error) {
				if _, err := all.get(name); err != nil {
					return name, err
				}
				if delete(all.Contexts, name); all.Current == name {
					all.Current = ""
				}
				return name, all.write()
			})
		},
	}
}

func completeContext(*cobra.Command, []string, string) ([]string, cobra.ShellCompDirective) {
	c, err := readContexts()
	if err != nil {
		return nil, cobra.ShellCompDirectiveError
	}
	return slices.Sorted(maps.Keys(c.Contexts)), cobra.ShellCompDirectiveNoFileComp
}
