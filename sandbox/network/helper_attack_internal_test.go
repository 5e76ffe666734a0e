package network

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"log/slog"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/drowse-vm/drowse/netpolicy"
	"github.com/drowse-vm/drowse/netpolicy/flow"
	"github.com/drowse-vm/drowse/sandbox/jail/rpc"
	"github.com/drowse-vm/drowse/sandbox/spec"
)

// startHelper serves in this process, and returns where.
func startHelper(t testing.TB, h *Helper) string {
	t.Helper()
	if os.Geteuid() != 0 {
		t.Skip("makes TAP devices: needs root")
	}
	socket := filepath.Join(t.TempDir(), "s")
	ln, err := net.ListenUnix("unixpacket", &net.UnixAddr{Name: socket, Net: "unixpacket"})
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	served, ready := make(chan error, 1), make(chan struct{})
	go func() { served <- h.Serve(ctx, ln, func() { close(ready) }) }()
	t.Cleanup(func() {
		cancel()
		if err := <-served; err != nil {
			t.Error(err)
		}
	})
	select {
	case <-ready:
	case err := <-served:
		served <- nil
		t.Fatal(err)
	}
	return socket
}

// attacker is a connection that says what it likes.
type attacker struct {
	t    testing.TB
	conn *rpc.Conn
}

func attack(t testing.TB, socket string) *attacker {
	t.Helper()
	f, err := dialHelper(socket)
	if err != nil {
		t.Fatal(err)
	}
	// A reader of flows that never takes its batch.
	c, err := rpc.New(f, helperOptions(func(ctx context.Context, _ string, _ []byte, files []*os.File) (any, []*os.File, error) {
		closeAll(files)
		<-ctx.Done()
		return nil, nil, ctx.Err()
	}))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = c.Close() })
	return &attacker{t, c}
}

func (a *attacker) call(method string, arg, reply any) error {
	ctx, cancel := context.WithTimeout(context.Background(), helperWait)
	defer cancel()
	files, err := a.conn.Call(ctx, method, arg, reply)
	closeAll(files)
	return err
}

// have goes as far as a link that is up.
func (a *attacker) have(p *netpolicy.Policy) (tap string, is addressReply) {
	a.t.Helper()
	err := a.call(helperOpen, openOrder{ID: spec.NewID()}, &tap)
	if err == nil {
		err = a.call(helperAddress, none{}, &is)
	}
	if err == nil {
		err = a.call(helperAttach, attachOrder{p, nil}, nil)
	}
	if err == nil {
		err = a.call(helperUp, none{}, nil)
	}
	if err != nil {
		a.t.Fatal(err)
	}
	return tap, is
}

func TestHelper_attacker_with_its_socket_gets_nothing_but_his_own_link(t *testing.T) {
	h := &Helper{}
	socket := startHelper(t, h)
	victim := attack(t, socket)
	theirs, address := victim.have(&netpolicy.Policy{})
	a := attack(t, socket)
	for name, x := range map[string]struct {
		method string
		arg    any
	}{
		"an address before a device":   {helperAddress, none{}},
		"a socket before a device":     {helperListen, arrivesDNS},
		"a policy before a device":     {helperAttach, attachOrder{&netpolicy.Policy{}, nil}},
		"up before a device":           {helperUp, none{}},
		"counters before a device":     {helperCounters, none{}},
		"flows before a device":        {helperFlows, flowsOrder{1, true}},
		"tags before a device":         {helperTags, []string{"db"}},
		"an id that is a path":         {helperOpen, openOrder{ID: "../../../../etc/passwd"}},
		"an id that is a device":       {helperOpen, openOrder{ID: theirs}},
		"an id of the wrong type":      {helperOpen, 7},
		"a call that does not exist":   {"exec", "/bin/sh"},
		"a call for the user's side":   {callRecords, recordBatch{}},
		"an event for the user's side": {postEvent, netpolicy.Event{}},
	} {
		if err := a.call(x.method, x.arg, nil); err == nil {
			t.Errorf("%s: it is done", name)
		}
	}
	own, is := a.have(&netpolicy.Policy{})
	if own == theirs || is.Address == address.Address {
		t.Errorf("he has %s and %v, as another", own, is.Address)
	}
	many := make([]string, netpolicy.MaxOwnTags+1)
	for i := range many {
		many[i] = strings.Repeat("a", i+1)
	}
	for name, x := range map[string]struct {
		method string
		arg    any
	}{
		"a second device":               {helperOpen, openOrder{ID: spec.NewID()}},
		"a second address":              {helperAddress, none{}},
		"a second link":                 {helperAttach, attachOrder{&netpolicy.Policy{}, nil}},
		"a second up":                   {helperUp, none{}},
		"a socket of another kind":      {helperListen, "tcp:0.0.0.0:22"},
		"a policy with too many flows":  {helperSwap, &netpolicy.Policy{Flows: helperFlowsN + 1}},
		"a policy with few flows":       {helperSwap, &netpolicy.Policy{Flows: -1}},
		"a policy of unknown fields":    {helperSwap, map[string]any{"rulez": 1}},
		"a policy with too many rules":  {helperSwap, &netpolicy.Policy{Rules: make([]netpolicy.Rule, netpolicy.MaxRules+1)}},
		"too many tags":                 {helperTags, many},
		"a tag that is too long":        {helperTags, []string{strings.Repeat("x", netpolicy.MaxTag+1)}},
		"a name that is none":           {helperPin, pin{"../../x", netip.MustParseAddr("192.0.2.1"), time.Hour}},
		"a name that is too long":       {helperPin, pin{strings.Repeat("a.", 200) + "b", netip.MustParseAddr("192.0.2.1"), time.Hour}},
		"a pin of no address":           {helperPin, pin{"example.com", netip.Addr{}, time.Hour}},
		"a pin with a zone":             {helperPin, pin{"example.com", netip.MustParseAddr("fe80::1%eth0"), time.Hour}},
		"a name for a flow of others":   {helperNamed, named{1, "example.com"}},
		"a refusal for a flow":          {helperRefused, refusal{1, netpolicy.ReasonTLSName, "x"}},
		"a reason that does not exist":  {helperRefused, refusal{1, 255, ""}},
		"a flow that is not":            {helperChecked, 443},
		"a rule of a negative number":   {"rule", ruleOf{0, -1}},
		"a port that is too large":      {helperChecked, 1 << 20},
		"a reader of the wrong type":    {helperFlows, "all"},
		"usage in a direction of lists": {helperUsage, []int{1}},
	} {
		if err := a.call(x.method, x.arg, nil); err == nil {
			t.Errorf("%s: it is done", name)
		} else if errors.Is(err, rpc.ErrPeerClosed) {
			t.Fatalf("%s: the helper has ended the connection: %v", name, err)
		}
	}
	// These answer, and say nothing.
	for _, x := range []struct {
		method string
		arg    any
	}{
		{helperRuleName, ruleOf{1 << 31, -1 << 31}}, {helperRuleName, ruleOf{1, 1 << 30}}, {helperName, netip.Addr{}},
		{helperOpens, opening{netip.AddrPort{}, "x"}}, {helperUsage, netpolicy.Direction("sideways")}, {helperLives, 1},
	} {
		var got any
		if err := a.call(x.method, x.arg, &got); err != nil {
			t.Errorf("%s: %v", x.method, err)
		} else if s, ok := got.(string); ok && s != "" {
			t.Errorf("%s says %q", x.method, s)
		}
	}
	// Readers that take nothing do not hold the link.
	for range helperReads + 2 {
		go func() { _ = a.call(helperFlows, flowsOrder{1, true}, nil) }()
	}
	for range 2 * changesBurst {
		if err := a.call(helperSwap, &netpolicy.Policy{}, nil); err != nil {
			if !strings.Contains(err.Error(), errBusy.Error()) {
				t.Error(err)
			}
			break
		}
	}
	if err := a.call(helperClose, none{}, nil); err != nil {
		t.Error(err)
	}
	if err := a.call(helperCounters, none{}, nil); err == nil {
		t.Error("a removed link has counters")
	}
	if err := a.call(helperOpen, openOrder{ID: spec.NewID()}, nil); err == nil {
		t.Error("a connection has a second link")
	}
	if _, err := net.InterfaceByName(own); err == nil {
		t.Error("his device is still there")
	}
	if _, err := net.InterfaceByName(theirs); err != nil {
		t.Errorf("another's device: %v", err)
	}
	if err := victim.call(helperCounters, none{}, nil); err != nil {
		t.Errorf("another's link: %v", err)
	}
}

func TestHelper_user_has_so_many_links_and_a_connection_that_says_nothing_ends(t *testing.T) {
	h := &Helper{UserLinks: 2}
	socket := startHelper(t, h)
	attack(t, socket).have(&netpolicy.Policy{}) // which may take longer than helperBegin
	second, third := attack(t, socket), attack(t, socket)
	if err := third.call(helperOpen, openOrder{ID: spec.NewID()}, nil); err == nil {
		t.Error("a user has three links of two")
	}
	<-second.conn.Done() // it has said nothing
	for {
		h.mu.Lock()
		all := h.all
		h.mu.Unlock()
		if all == 1 {
			break
		}
		time.Sleep(10 * time.Millisecond)
	}
	attack(t, socket).have(&netpolicy.Policy{})
}

func TestMaximum_denies_before_what_a_policy_allows(t *testing.T) {
	file := func(text string) string {
		path := filepath.Join(t.TempDir(), "p")
		if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
		return path
	}
	for name, x := range map[string]struct{ path, want string }{
		"no file":          {"/nonexistent", "metadata"},
		"a file that adds": {file(`rules: [{name: no lan, direction: egress, verdict: deny, cidrs: [10.0.0.0/8], protocols: [any]}]`), "10.0.0.0/8"},
		"rules that allow": {file(`rules: [{direction: egress, verdict: allow, cidrs: [10.0.0.0/8], protocols: [any]}]`), "error"},
		"rules with names": {file(`rules: [{direction: egress, verdict: deny, names: [a.com], protocols: [any]}]`), "error"},
		"no policy at all": {file(`rulez: 1`), "error"},
	} {
		rules, err := Maximum(x.path)
		text, _ := json.Marshal(rules)
		if (err != nil) != (x.want == "error") || err == nil && !bytes.Contains(text, []byte(x.want)) {
			t.Errorf("%s: %s, %v", name, text, err)
		}
	}
	most, err := Maximum("/nonexistent")
	if err != nil {
		t.Fatal(err)
	}
	n := &Network{log: slog.New(slog.DiscardHandler), agents: netip.MustParsePrefix("10.200.0.0/16"),
		agents6: netip.MustParsePrefix("fd64:726f:7773:2::/64"), address: netip.MustParseAddr("10.200.0.5"), maximum: most}
	s, err := n.compile(&netpolicy.Policy{Default: netpolicy.Defaults{Egress: netpolicy.Allow}}, nil, nil)
	if err != nil {
		t.Fatal(err)
	}
	if _, ok := s.Opens(netip.MustParseAddrPort("169.254.169.254:80"), nil, ""); ok {
		t.Error("metadata is open")
	}
	if _, ok := s.Opens(netip.MustParseAddrPort("93.184.216.34:80"), nil, ""); !ok {
		t.Error("the rest is shut")
	}
}

func TestSubordinate_ids_are_refused(t *testing.T) {
	path := filepath.Join(t.TempDir(), "subuid")
	if err := os.WriteFile(path, []byte("dev:100000:65536\nbroken\nx:y:z\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	for uid, ok := range map[uint32]bool{0: true, 1000: true, 99999: true, 100000: false, 165535: false, 165536: true} {
		if err := subordinate(path, uid); (err == nil) != ok {
			t.Errorf("%d: %v", uid, err)
		}
	}
}

// stillLink is a link of nothing.
type stillLink struct{ policed }

func (stillLink) Pin(string, netip.Addr, time.Duration) error            { return nil }
func (stillLink) Name(netip.Addr) string                                 { return "" }
func (stillLink) RuleName(uint32, int) string                            { return "" }
func (stillLink) Counters() ([]netpolicy.Counter, error)                 { return nil, nil }
func (stillLink) Usage(netpolicy.Direction) (u netpolicy.Usage, _ error) { return u, nil }
func (stillLink) Checked(uint16) (c flow.Checked, _ error)               { return c, nil }
func (stillLink) Lives(flow.Checked) (bool, error)                       { return false, nil }
func (stillLink) OpensName(flow.Checked, string) bool                    { return false }
func (stillLink) Opens(netip.AddrPort, string) (string, bool)            { return "", false }
func (stillLink) SetTags(tags []string) error                            { return netpolicy.CheckTags(tags) }
func (stillLink) Swap(*netpolicy.Spec) error                             { return nil }

// stillLog is a log of nothing.
type stillLog struct{ flowLog }

func (stillLog) Refused(flow.Checked, netpolicy.Reason, string) {}
func (stillLog) Named(flow.Checked, string)                     {}
func (stillLog) Records(context.Context, bool, func([]netpolicy.FlowRecord) error) error {
	return nil
}

// Any call of a user gets an answer.
func FuzzHelper_calls(f *testing.F) {
	for _, s := range []struct{ method, body string }{
		{helperSwap, `{"rules":[{"direction":"egress","verdict":"allow","groups":["any"],"protocols":["tcp"],"ports":["443"]}]}`},
		{helperAttach, `{"policy":{},"tags":["a"]}`}, {helperTags, `["a","b"]`}, {helperListen, `"x"`}, {helperUp, `{}`},
		{helperPin, `{"name":"example.com","address":"192.0.2.1","ttl":5}`}, {helperOpens, `{"peer":"192.0.2.1:443"}`},
		{helperChecked, `443`}, {helperRefused, `{"flow":1,"reason":3}`}, {helperFlows, `{"stream":1,"follow":true}`},
		{helperUsage, `"egress"`}, {helperRuleName, `{"generation":1,"rule":-5}`}, {helperOpen, `{"id":"x"}`},
	} {
		f.Add(s.method, []byte(s.body))
	}
	f.Fuzz(func(t *testing.T, method string, body []byte) {
		if method == helperListen || method == helperClose {
			return // which need a device
		}
		n := &Network{log: slog.New(slog.DiscardHandler), agents: netip.MustParsePrefix("10.200.0.0/16"), lent: true, own6: netip.Addr{},
			agents6: netip.MustParsePrefix("fd64:726f:7773:2::/64"), address: netip.MustParseAddr("10.200.0.5"), policy: &netpolicy.Policy{},
			link: stillLink{}, flows: stillLog{}}
		n.remote = &remote{n: n, name: "x"} // so the host is left alone
		n.keeper = newKeeper(n)
		l := &lent{h: &Helper{}, n: n, reads: make(chan struct{}, 1), begun: make(chan struct{}), connected: make(chan struct{}),
			pace: rpc.NewPace(callBurst, callsPerSecond)}
		close(l.connected)
		for _, up := range []bool{false, true} {
			l.up = up
			if method == helperUp && !up || method == helperSwap && up {
				continue // which ask the host
			}
			_, files, _ := l.serve(context.Background(), method, body, nil)
			if closeAll(files); len(files) > 0 {
				t.Error("a call that makes nothing has descriptors")
			}
		}
		var p netpolicy.Policy
		if method == helperSwap && json.Unmarshal(body, &p) == nil && l.policy(&p) == nil {
			_, _ = n.compile(&p, nil, nil)
		}
	})
}
