package api_test

import (
	"fmt"
	"maps"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"crypto/sha256"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"

	"github.com/drowse-vm/drowse/internal/test/vouch"
	"github.com/drowse-vm/drowse/sandbox"
	"github.com/drowse-vm/drowse/sandbox/api"
	"github.com/drowse-vm/drowse/sandbox/api/identity"
	"github.com/drowse-vm/drowse/sandbox/api/tokens"
	"github.com/drowse-vm/drowse/sandbox/sandboxtest"
	"github.com/drowse-vm/drowse/sandbox/spec"
)

// rights says what each route of the description wants of its caller, and whether a caller with an owner may ask.
// A route that is missing here fails the test.
var rights = map[string]struct {
	scope tokens.Scope
	// of says whose it is: "" everybody's, "sandbox" and "snapshot" of one owner, "mine" filtered by the owner,
	// "host" refused to callers with an owner.
	of string
}{
	"GET /healthz":                                         {tokens.ScopeNone, ""},
	"GET /readyz":                                          {tokens.ScopeNone, ""},
	"GET /v1/openapi.json":                                 {tokens.ScopeNone, ""},
	"GET /v1/version":                                      {tokens.ScopeRead, ""},
	"GET /v1/sandboxes":                                    {tokens.ScopeRead, "mine"},
	"POST /v1/sandboxes":                                   {tokens.ScopeCreate, "mine"},
	"GET /v1/sandboxes/{name}":                             {tokens.ScopeRead, "sandbox"},
	"PATCH /v1/sandboxes/{name}":                           {tokens.ScopeCreate, "sandbox"},
	"DELETE /v1/sandboxes/{name}":                          {tokens.ScopeCreate, "sandbox"},
	"POST /v1/sandboxes/{name}/start":                      {tokens.ScopeCreate, "sandbox"},
	"POST /v1/sandboxes/{name}/wake":                       {tokens.ScopeCreate, "sandbox"},
	"POST /v1/sandboxes/{name}/sleep":                      {tokens.ScopeCreate, "sandbox"},
	"POST /v1/sandboxes/{name}/stop":                       {tokens.ScopeCreate, "sandbox"},
	"POST /v1/sandboxes/{name}/snapshot":                   {tokens.ScopeCreate, "sandbox"},
	"POST /v1/sandboxes/{name}/migrate":                    {tokens.ScopeAdmin, "host"},
	"POST /v1/sandboxes/{name}/promote":                    {tokens.ScopeCreate, "sandbox"},
	"POST /v1/sandboxes/{name}/restore":                    {tokens.ScopeCreate, "sandbox"},
	"POST /v1/sandboxes/{name}/fork":                       {tokens.ScopeCreate, "sandbox"},
	"POST /v1/sandboxes/{name}/rename":                     {tokens.ScopeCreate, "sandbox"},
	"POST /v1/sandboxes/{name}/extend":                     {tokens.ScopeCreate, "sandbox"},
	"POST /v1/sandboxes/{name}/exec":                       {tokens.ScopeExec, "sandbox"},
	"GET /v1/sandboxes/{name}/exec":                        {tokens.ScopeExec, "sandbox"},
	"GET /v1/sandboxes/{name}/processes":                   {tokens.ScopeExec, "sandbox"},
	"POST /v1/sandboxes/{name}/processes":                  {tokens.ScopeExec, "sandbox"},
	"GET /v1/sandboxes/{name}/processes/{process}/attach":  {tokens.ScopeExec, "sandbox"},
	"POST /v1/sandboxes/{name}/processes/{process}/signal": {tokens.ScopeExec, "sandbox"},
	"DELETE /v1/sandboxes/{name}/processes/{process}":      {tokens.ScopeExec, "sandbox"},
	"GET /v1/sandboxes/{name}/ports/{port}":                {tokens.ScopeExec, "sandbox"},
	"GET /v1/sandboxes/{name}/files":                       {tokens.ScopeFiles, "sandbox"},
	"PUT /v1/sandboxes/{name}/files":                       {tokens.ScopeFiles, "sandbox"},
	"DELETE /v1/sandboxes/{name}/files":                    {tokens.ScopeFiles, "sandbox"},
	"GET /v1/sandboxes/{name}/files/stat":                  {tokens.ScopeFiles, "sandbox"},
	"GET /v1/sandboxes/{name}/files/list":                  {tokens.ScopeFiles, "sandbox"},
	"POST /v1/sandboxes/{name}/files/mkdir":                {tokens.ScopeFiles, "sandbox"},
	"POST /v1/sandboxes/{name}/files/move":                 {tokens.ScopeFiles, "sandbox"},
	"GET /v1/sandboxes/{name}/files/tree":                  {tokens.ScopeFiles, "sandbox"},
	"PUT /v1/sandboxes/{name}/files/tree":                  {tokens.ScopeFiles, "sandbox"},
	"GET /v1/sandboxes/{name}/files/watch":                 {tokens.ScopeFiles, "sandbox"},
	"GET /v1/sandboxes/{name}/diff":                        {tokens.ScopeFiles, "sandbox"},
	"GET /v1/sandboxes/{name}/history":                     {tokens.ScopeRead, "sandbox"},
	"GET /v1/sandboxes/{name}/snapshots":                   {tokens.ScopeRead, "sandbox"},
	"GET /v1/sandboxes/{name}/stats":                       {tokens.ScopeRead, "sandbox"},
	"GET /v1/sandboxes/{name}/policy":                      {tokens.ScopeRead, "sandbox"},
	"PUT /v1/sandboxes/{name}/policy":                      {tokens.ScopeCreate, "sandbox"},
	"GET /v1/sandboxes/{name}/flows":                       {tokens.ScopeRead, "sandbox"},
	"GET /v1/sandboxes/{name}/flows/follow":                {tokens.ScopeRead, "sandbox"},
	"GET /v1/sandboxes/{name}/console":                     {tokens.ScopeRead, "sandbox"},
	"GET /v1/sandboxes/{name}/audit":                       {tokens.ScopeRead, "sandbox"},
	"GET /v1/sandboxes/{name}/network":                     {tokens.ScopeRead, "sandbox"},
	"GET /v1/sandboxes/{name}/network/events":              {tokens.ScopeRead, "sandbox"},
	"GET /v1/sandboxes/{name}/inspect":                     {tokens.ScopeRead, "sandbox"},
	"GET /v1/sandboxes/{name}/gateway":                     {tokens.ScopeExec, "sandbox"},
	"GET /v1/host":                                         {tokens.ScopeRead, "host"},
	"GET /v1/templates":                                    {tokens.ScopeRead, "host"},
	"POST /v1/templates":                                   {tokens.ScopeAdmin, "host"},
	"GET /v1/templates/{template}":                         {tokens.ScopeRead, "host"},
	"DELETE /v1/templates/{template}":                      {tokens.ScopeAdmin, "host"},
	"GET /v1/secret-sources":                               {tokens.ScopeRead, "mine"},
	"GET /v1/sandboxes/{name}/secrets":                     {tokens.ScopeRead, "sandbox"},
	"PUT /v1/sandboxes/{name}/secrets/{secret}":            {tokens.ScopeCreate, "sandbox"},
	"DELETE /v1/sandboxes/{name}/secrets/{secret}":         {tokens.ScopeCreate, "sandbox"},
	"GET /v1/sandboxes/{name}/services":                    {tokens.ScopeRead, "sandbox"},
	"PUT /v1/sandboxes/{name}/services/{service}":          {tokens.ScopeCreate, "sandbox"},
	"DELETE /v1/sandboxes/{name}/services/{service}":       {tokens.ScopeCreate, "sandbox"},
	"POST /v1/sandboxes/{name}/services/{service}/start":   {tokens.ScopeCreate, "sandbox"},
	"POST /v1/sandboxes/{name}/services/{service}/restart": {tokens.ScopeCreate, "sandbox"},
	"POST /v1/sandboxes/{name}/services/{service}/stop":    {tokens.ScopeCreate, "sandbox"},
	"GET /v1/sandboxes/{name}/services/{service}/wait":     {tokens.ScopeRead, "sandbox"},
	"GET /v1/sandboxes/{name}/services/{service}/log":      {tokens.ScopeRead, "sandbox"},
	"GET /v1/snapshots":                                    {tokens.ScopeRead, "mine"},
	"GET /v1/snapshots/{id}":                               {tokens.ScopeRead, "snapshot"},
	"POST /v1/snapshots/{id}/tags":                         {tokens.ScopeCreate, "snapshot"},
	"POST /v1/snapshots/{id}/clone":                        {tokens.ScopeCreate, "snapshot"},
	"GET /v1/snapshots/{id}/export":                        {tokens.ScopeCreate, "snapshot"},
	"DELETE /v1/snapshots/{id}":                            {tokens.ScopeCreate, "snapshot"},
	"POST /v1/snapshots/import":                            {tokens.ScopeAdmin, "host"},
	"GET /v1/images":                                       {tokens.ScopeRead, ""},
	"GET /v1/images/{ref}":                                 {tokens.ScopeRead, ""},
	"GET /v1/images/{ref}/export":                          {tokens.ScopeRead, ""},
	"POST /v1/images/pull":                                 {tokens.ScopeAdmin, "host"},
	"POST /v1/images/import":                               {tokens.ScopeAdmin, "host"},
	"DELETE /v1/images/{ref}":                              {tokens.ScopeAdmin, "host"},
	"GET /v1/volumes":                                      {tokens.ScopeRead, "host"},
	"GET /v1/volumes/{volume}":                             {tokens.ScopeRead, "host"},
	"POST /v1/volumes":                                     {tokens.ScopeAdmin, "host"},
	"POST /v1/volumes/{volume}/resize":                     {tokens.ScopeAdmin, "host"},
	"DELETE /v1/volumes/{volume}":                          {tokens.ScopeAdmin, "host"},
	"GET /v1/operations":                                   {tokens.ScopeAdmin, "host"},
	"GET /v1/operations/{operation}":                       {tokens.ScopeAdmin, "host"},
	"DELETE /v1/operations/{operation}":                    {tokens.ScopeAdmin, "host"},
	"POST /v1/prune":                                       {tokens.ScopeAdmin, "host"},
	"GET /v1/events":                                       {tokens.ScopeRead, "mine"},
}

func TestRights_of_every_route_are_those_of_the_table(t *testing.T) {
	d, err := theDescription()
	if err != nil {
		t.Fatal(err)
	}
	var described []string
	for path, methods := range d.Paths {
		for method := range methods {
			described = append(described, strings.ToUpper(method)+" "+path)
		}
	}
	slices.Sort(described)
	for route := range rights {
		if !slices.Contains(described, route) {
			t.Errorf("%s is in the table and not described", route)
		}
	}
	m := newMachines(t)
	theirs, err := m.host.Create(t.Context(), sandbox.Spec{Name: "theirs", Image: sandboxtest.Image, Network: spec.NetworkTAP}, sandbox.CreateOptions{Metadata: &spec.Metadata{Owner: "them"}})
	if err != nil {
		t.Fatal(err)
	}
	shot, err := theirs.Snapshot(t.Context(), sandbox.SnapshotOptions{})
	if err != nil {
		t.Fatal(err)
	}
	path := filepath.Join(t.TempDir(), tokens.File)
	expired := fmt.Sprintf("expired %x write expires=2020-01-01T00:00:00Z\n", sha256.Sum256([]byte("expired-secret")))
	if err := os.WriteFile(path, []byte(expired), 0o600); err != nil {
		t.Fatal(err)
	}
	known := tokens.Open(path)
	token := func(name, owner string, scopes tokens.Scopes) string {
		secret, err := known.Create(tokens.Token{Name: name, Owner: owner, Scopes: scopes})
		if err != nil {
			t.Fatal(err)
		}
		return secret
	}
	some := func(but tokens.Scope) (out tokens.Scopes) {
		for _, s := range tokens.All() {
			if s != but {
				out = append(out, s)
			}
		}
		return out
	}
	all, ours := vouched(t, some)
	all["token"] = shows{
		"none": func(*http.Request) {}, "unknown": bearer("drowse_unknown"), "expired": bearer("expired-secret"),
		"other": bearer(token("ours", "us", some(tokens.ScopeAdmin))),
	}
	for _, s := range tokens.All() {
		all["token"]["but "+string(s)] = bearer(token("all-but-"+string(s), "", some(s)))
	}
	server := api.New(api.Options{Host: m.host, Tokens: known, Identities: ours})
	before := stateOf(t, m.host)
	var table strings.Builder
	fmt.Fprintf(&table, "%-58s %-7s %-11s %5s %7s %7s %8s %5s %6s\n", "route", "scope", "by", "none", "unknown", "expired", "unmapped", "wrong", "other")
	for _, route := range described {
		want, ok := rights[route]
		if !ok {
			t.Errorf("%s has no rule: say what it wants in the table", route)
			continue
		}
		method, pattern, _ := strings.Cut(route, " ")
		for _, by := range slices.Sorted(maps.Keys(all)) {
			ask := func(how string) int {
				show := all[by][how]
				if show == nil {
					return 0
				}
				where := strings.NewReplacer("{name}", "theirs", "{id}", shot.Snapshot, "{process}", "1", "{port}", "80", "{secret}", "s", "{service}", "s", "{ref}", "none", "{volume}", "none", "{operation}", "none", "{template}", "none").Replace(pattern)
				r := httptest.NewRequestWithContext(t.Context(), method, "http://localhost"+where, nil)
				show(r)
				w := httptest.NewRecorder()
				server.ServeHTTP(w, r)
				return w.Code
			}
			none, unknown, late, unmapped := ask("none"), ask("unknown"), ask("expired"), ask("unmapped")
			wrongScope, other := 0, 0
			if want.scope == tokens.ScopeNone {
				if none/100 == 4 || unknown/100 == 4 || late/100 == 4 || unmapped/100 == 4 {
					t.Errorf("%s is for everybody, and answers %d, %d, %d and %d by %s", route, none, unknown, late, unmapped, by)
				}
			} else {
				wrongScope = ask("but " + string(want.scope))
				if none != 401 || unknown != 401 || late != 401 || wrongScope != 403 || by != "token" && unmapped != 403 {
					t.Errorf("%s by %s answers %d without anything, %d to an unknown one, %d to an expired one, %d to one without a rule, %d to a wrong scope", route, by, none, unknown, late, unmapped, wrongScope)
				}
				other = ask("other")
				switch want.of {
				case "sandbox", "snapshot":
					if other != 404 {
						t.Errorf("%s by %s answers %d to another owner, want 404", route, by, other)
					}
				case "host":
					if other != 403 {
						t.Errorf("%s by %s answers %d to a caller with an owner, want 403", route, by, other)
					}
				}
			}
			fmt.Fprintf(&table, "%-58s %-7s %-11s %5d %7d %7d %8d %5d %6d\n", route, want.scope, by, none, unknown, late, unmapped, wrongScope, other)
		}
	}
	t.Log("\n" + table.String())
	if after := stateOf(t, m.host); after != before {
		t.Errorf("sandboxes were\n%s\nand are\n%s", before, after)
	}
}

// shows are ways in which a caller shows who it is, by what is to come of it.
type shows map[string]func(*http.Request)

func bearer(text string) func(*http.Request) {
	return func(r *http.Request) { r.Header.Set("Authorization", "Bearer "+text) }
}

// vouched returns callers for whom an issuer and an authority of certificates vouch, and those who let them in.
func vouched(t *testing.T, but func(tokens.Scope) tokens.Scopes) (map[string]shows, *identity.Store) {
	t.Helper()
	issuer, ca := vouch.NewIssuer(t), vouch.NewAuthority(t)
	rules := func(claim string) (out string) {
		for _, s := range tokens.All() {
			out += fmt.Sprintf("  - {match: {%s: 'but %s'}, all_owners: true, scopes: '%s'}\n", claim, s, but(s))
		}
		return out + fmt.Sprintf("  - {match: {%s: other}, owner: us, scopes: '%s'}\n  - {match: {%s: expired}, all_owners: true, scopes: write}\n", claim, but(tokens.ScopeAdmin), claim)
	}
	file := filepath.Join(t.TempDir(), "identities.yaml")
	text := fmt.Sprintf("issuers:\n- name: idp\n  url: %s\n  audience: drowse\n  ca: %s\n  rules:\n%scertificates:\n  rules:\n%s", issuer.URL, issuer.CA, rules("sub"), rules("cn"))
	if err := os.WriteFile(file, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	ids, err := identity.Open(identity.Options{File: file, ClientCA: ca.File})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(ids.Close)
	cert := func(by *vouch.Authority, name string, until time.Duration) func(*http.Request) {
		is := by.Client(&x509.Certificate{Subject: pkix.Name{CommonName: name}, NotBefore: time.Now().Add(-time.Hour), NotAfter: time.Now().Add(until)})
		return func(r *http.Request) { r.TLS = &tls.ConnectionState{PeerCertificates: []*x509.Certificate{is.Leaf}} }
	}
	past := map[string]any{"exp": time.Now().Add(-time.Minute).Unix()}
	foreign := vouch.NewIssuer(t)
	jwt := shows{
		"none": bearer(""), "unknown": bearer(foreign.Token("expired", map[string]any{"iss": issuer.URL})), "expired": bearer(issuer.Token("expired", past)),
		"unmapped": bearer(issuer.Token("nobody", nil)), "other": bearer(issuer.Token("other", nil)),
	}
	certs := shows{
		"none": func(r *http.Request) { r.TLS = &tls.ConnectionState{} }, "unknown": cert(vouch.NewAuthority(t), "expired", time.Hour), "expired": cert(ca, "expired", -time.Minute),
		"unmapped": cert(ca, "nobody", time.Hour), "other": cert(ca, "other", time.Hour),
	}
	for _, s := range tokens.All() {
		name := "but " + string(s)
		jwt[name], certs[name] = bearer(issuer.Token(name, nil)), cert(ca, name, time.Hour)
	}
	return map[string]shows{"jwt": jwt, "certificate": certs}, ids
}

func TestToken_beside_a_certificate_decides_alone(t *testing.T) {
	all, ids := vouched(t, func(tokens.Scope) tokens.Scopes { return tokens.Scopes{tokens.ScopeRead, tokens.ScopeExec} })
	known := tokens.Open(filepath.Join(t.TempDir(), tokens.File))
	secret, err := known.Create(tokens.Token{Name: "static", Scopes: tokens.Scopes{tokens.ScopeRead}})
	if err != nil {
		t.Fatal(err)
	}
	server := api.New(api.Options{Host: &sandbox.Host{}, Tokens: known, Identities: ids})
	good, bad := all["certificate"]["other"], all["certificate"]["unknown"]
	basic := func(r *http.Request) { r.SetBasicAuth("a", "b") }
	for name, tc := range map[string]struct {
		show []func(*http.Request)
		code int
		says string
	}{
		"a certificate alone":                      {[]func(*http.Request){good}, 200, `"owner":"us"`},
		"a token beside it":                        {[]func(*http.Request){good, bearer(secret)}, 200, `"scopes":["read"]}`},
		"a token of an issuer beside it":           {[]func(*http.Request){good, all["jwt"]["but admin"]}, 200, `"scopes":["read","exec"]}`},
		"an unknown token beside it":               {[]func(*http.Request){good, bearer("drowse_x")}, 401, "no token that is known"},
		"an expired token beside it":               {[]func(*http.Request){good, all["jwt"]["expired"]}, 401, "has expired at"},
		"an unmapped token beside it":              {[]func(*http.Request){good, all["jwt"]["unmapped"]}, 403, "idp:nobody may do nothing here"},
		"an empty token beside it":                 {[]func(*http.Request){good, bearer("")}, 401, "no token"},
		"another way to say who it is":             {[]func(*http.Request){good, basic}, 401, "no token"},
		"a bad certificate alone":                  {[]func(*http.Request){bad}, 401, "the client certificate is refused"},
		"a bad certificate, which need not be one": {[]func(*http.Request){bad, bearer(secret)}, 200, `"scopes":["read"]}`},
		"an expired certificate":                   {[]func(*http.Request){all["certificate"]["expired"]}, 401, "the client certificate has expired"},
		"a certificate that no rule knows":         {[]func(*http.Request){all["certificate"]["unmapped"]}, 403, "cert:cn:nobody may do nothing here"},
	} {
		r := httptest.NewRequest(http.MethodGet, "https://localhost/v1/version", nil)
		for _, show := range tc.show {
			show(r)
		}
		w := httptest.NewRecorder()
		server.ServeHTTP(w, r)
		if w.Code != tc.code || !strings.Contains(w.Body.String(), tc.says) {
			t.Errorf("%s: %d %s, want %d with %s", name, w.Code, w.Body, tc.code, tc.says)
		}
	}
}

// as returns a function that asks a server with a token.
func asker(t *testing.T, s *api.Server, token string) func(method, path, body string) (int, string) {
	return func(method, path, body string) (int, string) {
		t.Helper()
		r := httptest.NewRequestWithContext(t.Context(), method, "http://localhost"+path, strings.NewReader(body))
		r.Header.Set("Authorization", "Bearer "+token)
		if body != "" {
			r.Header.Set("Content-Type", "application/json")
		}
		w := httptest.NewRecorder()
		s.ServeHTTP(w, r)
		return w.Code, w.Body.String()
	}
}

func TestOwners_see_and_make_only_what_is_theirs(t *testing.T) {
	m := newMachines(t)
	known := tokens.Open(filepath.Join(t.TempDir(), tokens.File))
	server := api.New(api.Options{Host: m.host, Tokens: known})
	as := func(owner string) func(method, path, body string) (int, string) {
		secret, err := known.Create(tokens.Token{Name: owner, Owner: owner, Scopes: tokens.Scopes{tokens.ScopeRead, tokens.ScopeExec, tokens.ScopeFiles, tokens.ScopeCreate}})
		if err != nil {
			t.Fatal(err)
		}
		return asker(t, server, secret)
	}
	us, them := as("us"), as("them")
	create := func(name, more string) string {
		return fmt.Sprintf(`{"spec":{"name":%q,"image":"test"%s}}`, name, more)
	}
	if code, text := us("POST", "/v1/sandboxes", create("a", "")); code != 201 || !strings.Contains(text, `"owner":"us"`) {
		t.Fatalf("%d %s", code, text)
	}
	if code, text := them("POST", "/v1/sandboxes", create("b", "")); code != 201 {
		t.Fatalf("%d %s", code, text)
	}
	for name, tc := range map[string]struct {
		method, path, body string
		want               int
	}{
		"another owner":              {"POST", "/v1/sandboxes", `{"spec":{"name":"c","image":"test"},"metadata":{"owner":"them"}}`, 403},
		"a name that is taken":       {"POST", "/v1/sandboxes", create("b", ""), 409},
		"get or create of another's": {"POST", "/v1/sandboxes", `{"spec":{"name":"b","image":"test"},"get_or_create":true}`, 409},
		"a volume":                   {"POST", "/v1/sandboxes", create("c", `,"volumes":[{"name":"v","path":"/v"}]`), 403},
		"a share":                    {"POST", "/v1/sandboxes", create("c", `,"shares":[{"source":"/etc","path":"/v"}]`), 400},
		"giving it away":             {"PATCH", "/v1/sandboxes/a", `{"owner":"them"}`, 403},
		"its own owner":              {"PATCH", "/v1/sandboxes/a", `{"owner":"us","purpose":"p"}`, 200},
		"a reset":                    {"PATCH", "/v1/sandboxes/a", `{"reset":true}`, 200},
		"a list of others":           {"GET", "/v1/sandboxes?owner=them", "", 403},
		"a fork over another's":      {"POST", "/v1/sandboxes/a/fork", `{"children":[{"name":"b"}]}`, 409},
		"history of another's":       {"GET", "/v1/sandboxes/b/history", "", 404},
		"a name that is none's":      {"GET", "/v1/sandboxes/none", "", 404},
		"prune":                      {"POST", "/v1/prune", "", 403},
	} {
		if code, text := us(tc.method, tc.path, tc.body); code != tc.want {
			t.Errorf("%s: %d, want %d: %s", name, code, tc.want, text)
		}
	}
	_, missing := us("GET", "/v1/sandboxes/none", "")
	_, hidden := us("GET", "/v1/sandboxes/b", "")
	if strings.ReplaceAll(missing, "none", "b") != hidden {
		t.Errorf("one that is not there: %s\none of another: %s", missing, hidden)
	}
	if code, text := us("POST", "/v1/sandboxes/a/fork", `{"children":[{"name":"kid"}]}`); code != 200 || !strings.Contains(text, `"owner":"us"`) {
		t.Errorf("a child: %d %s", code, text)
	}
	shot, err := m.host.Sandbox("b").Snapshot(t.Context(), sandbox.SnapshotOptions{})
	if err != nil {
		t.Fatal(err)
	}
	for name, tc := range map[string]struct{ method, path, body string }{
		"clone":  {"POST", "/v1/snapshots/" + shot.Snapshot + "/clone", `{"name":"x"}`},
		"disk":   {"POST", "/v1/sandboxes", fmt.Sprintf(`{"spec":{"name":"x","image":"test"},"disk":%q}`, shot.Snapshot)},
		"rewind": {"POST", "/v1/sandboxes/a/restore", fmt.Sprintf(`{"snapshot":%q}`, shot.Snapshot[:12])},
		"rotate": {"PATCH", "/v1/sandboxes/a", fmt.Sprintf(`{"rotate":{"to":%q}}`, shot.Snapshot)},
		"export": {"GET", "/v1/snapshots/" + shot.Snapshot + "/export", ""},
	} {
		if code, text := us(tc.method, tc.path, tc.body); code != 404 {
			t.Errorf("%s of another's snapshot: %d %s", name, code, text)
		}
	}
	if _, text := us("GET", "/v1/sandboxes", ""); strings.Contains(text, "them") || !strings.Contains(text, `"name":"a"`) {
		t.Errorf("the list: %s", text)
	}
	if _, text := us("GET", "/v1/snapshots", ""); strings.Contains(text, shot.Snapshot) {
		t.Errorf("the snapshots: %s", text)
	}
	if _, text := them("GET", "/v1/snapshots", ""); !strings.Contains(text, shot.Snapshot) {
		t.Errorf("their snapshots: %s", text)
	}
	if code, text := them("DELETE", "/v1/sandboxes/b", ""); code != 200 {
		t.Errorf("%d %s", code, text)
	}
	if code, _ := us("GET", "/v1/sandboxes/b/history", ""); code != 404 {
		t.Errorf("history of another's that was removed: %d", code)
	}
	if code, text := them("GET", "/v1/sandboxes/b/history", ""); code != 200 {
		t.Errorf("history of one's own that was removed: %d %s", code, text)
	}
}

func TestTokens_of_a_rate_are_told_when_to_come_again(t *testing.T) {
	known := tokens.Open(filepath.Join(t.TempDir(), tokens.File))
	secret, err := known.Create(tokens.Token{Name: "slow", Scopes: tokens.All(), Rate: 1})
	if err != nil {
		t.Fatal(err)
	}
	server := api.New(api.Options{Host: &sandbox.Host{}, Tokens: known})
	for begin := time.Now(); time.Since(begin) < time.Minute; {
		r := httptest.NewRequest(http.MethodGet, "http://localhost/v1/version", nil)
		r.Header.Set("Authorization", "Bearer "+secret)
		w := httptest.NewRecorder()
		server.ServeHTTP(w, r)
		if w.Code == http.StatusTooManyRequests {
			if w.Header().Get("Retry-After") == "" {
				t.Error("it does not say when")
			}
			return
		}
	}
	t.Error("a token of one request a second has as many as it likes")
}

func TestEvents_are_those_of_the_owner_and_say_what_is_wrong(t *testing.T) {
	m := newMachines(t)
	known := tokens.Open(filepath.Join(t.TempDir(), tokens.File))
	secret, err := known.Create(tokens.Token{Name: "us", Owner: "us", Scopes: tokens.Scopes{tokens.ScopeRead}})
	if err != nil {
		t.Fatal(err)
	}
	for name, owner := range map[string]string{"ours": "us", "theirs": "them"} {
		if _, err := m.host.Create(t.Context(), sandbox.Spec{Name: name, Image: sandboxtest.Image}, sandbox.CreateOptions{Metadata: &spec.Metadata{Owner: owner}}); err != nil {
			t.Fatal(err)
		}
	}
	us := asker(t, api.New(api.Options{Host: m.host, Tokens: known}), secret)
	if code, text := us("GET", "/v1/events", ""); code != 200 || strings.Contains(text, "theirs") || !strings.Contains(text, `"ours"`) {
		t.Errorf("%d %s", code, text)
	}
	if code, _ := us("GET", "/v1/events?owner=them", ""); code != 403 {
		t.Errorf("of another owner: %d", code)
	}
	if code, text := us("GET", "/v1/events?since=never", ""); code != 400 || !strings.Contains(text, `"code":"invalid"`) {
		t.Errorf("%d %s", code, text)
	}
}
