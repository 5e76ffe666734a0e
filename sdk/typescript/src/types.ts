// Made from sandbox/api/openapi.json by: go test ./sdk/sdktest -run Types -update

export type ChangesRequest = {
  class?: "" | "ephemeral" | "resumable" | "workspace" | null;
  expires?: string | null;
  gateway?: {
    all_public?: boolean;
    guest_tls?: Array<number> | null;
    host?: string;
    idle_streams?: boolean;
    public_ports?: Array<number> | null;
  } | null;
  hooks?: {
    all_seconds?: number;
    policy?: "" | "require" | "ignore" | "skip";
    timeout_seconds?: number;
  } | null;
  idle?: {
    cpu_percent?: number;
    sleep_seconds?: number;
  } | null;
  keep?: {
    expired_seconds?: number;
    for_seconds?: number;
    last?: number;
  } | null;
  memory_mib?: number | null;
  new_gateway_token?: boolean;
  no_expiry?: boolean;
  no_rotate?: boolean;
  no_wake?: boolean;
  owner?: string | null;
  persist?: {
    drop?: Array<string> | null;
    max_bytes?: number;
    promote?: Array<{
      path?: string;
      to?: string;
    }> | null;
  } | null;
  policy?: PolicyRequest;
  purpose?: string | null;
  reset?: boolean;
  rotate?: {
    at?: string;
    every_seconds?: number;
    to?: string;
  } | null;
  tags?: Array<string> | null;
  vcpus?: number | null;
  wake?: {
    at?: string;
    every_seconds?: number;
  } | null;
};

export type CloneRequest = {
  idle?: {
    cpu_percent?: number;
    sleep_seconds?: number;
  } | null;
  metadata?: {
    asked?: {
      expires?: string;
      fork?: {
        at?: string;
        begun?: boolean;
        child?: string;
        error?: string;
        id?: string;
      };
      from?: string;
      wake?: string;
    };
    class?: "" | "ephemeral" | "resumable" | "workspace";
    e2b?: {
      disk_only?: boolean;
      env_vars?: Record<string, string>;
      metadata?: Record<string, string>;
      network?: {
        allow_out?: Array<string> | null;
        deny_out?: Array<string> | null;
        host?: string;
        https_ports?: Array<number> | null;
        no_internet?: boolean;
        private?: boolean;
      };
      pause?: boolean;
      resume?: boolean;
      template?: string;
      timeout_seconds?: number;
      user?: string;
      workdir?: string;
    } | null;
    expires?: string;
    expiry_told?: string;
    gateway?: {
      all_public?: boolean;
      guest_tls?: Array<number> | null;
      host?: string;
      idle_streams?: boolean;
      public_ports?: Array<number> | null;
      tokens?: number;
    };
    keep?: {
      expired_seconds?: number;
      for_seconds?: number;
      last?: number;
    };
    owner?: string;
    persist?: {
      drop?: Array<string> | null;
      max_bytes?: number;
      promote?: Array<{
        path?: string;
        to?: string;
      }> | null;
    };
    purpose?: string;
    rotate?: {
      at?: string;
      every_seconds?: number;
      to?: string;
    };
    tags?: Array<string> | null;
    wake?: {
      at?: string;
      every_seconds?: number;
    };
  };
  name?: string;
  policy?: PolicyRequest;
};

export type Control = {
  bytes?: number;
  cols?: number;
  command?: Array<string> | null;
  cwd?: string;
  detach?: boolean;
  env?: Array<string> | null;
  error?: {
    code: string;
    field?: string;
    hooks?: Array<{
      event: string;
      name: string;
      output?: string;
      problem: string;
    }> | null;
    host_hooks?: Array<{
      event: string;
      name: string;
      output?: string;
      problem: string;
    }> | null;
    message: string;
    op?: string;
    remedy?: string;
    sandbox?: string;
  } | null;
  exit?: {
    cpu_ms?: number;
    exit_code: number;
    not_started?: string;
    signal?: number;
    timed_out?: boolean;
  } | null;
  hold_output?: boolean;
  no_stdin?: boolean;
  offset?: number;
  output_kib?: number;
  pid?: number;
  process?: string;
  rows?: number;
  signal?: number;
  stdin?: boolean;
  timeout_seconds?: number;
  tty?: {
    cols?: number;
    rows?: number;
    term?: string;
  } | null;
  type: "start" | "resize" | "signal" | "eof" | "ack" | "detach" | "started" | "exit" | "error";
  user?: string;
  window?: number;
};

export type CreateRequest = {
  boot?: boolean;
  disk?: string;
  get_or_create?: boolean;
  metadata?: {
    asked?: {
      expires?: string;
      fork?: {
        at?: string;
        begun?: boolean;
        child?: string;
        error?: string;
        id?: string;
      };
      from?: string;
      wake?: string;
    };
    class?: "" | "ephemeral" | "resumable" | "workspace";
    e2b?: {
      disk_only?: boolean;
      env_vars?: Record<string, string>;
      metadata?: Record<string, string>;
      network?: {
        allow_out?: Array<string> | null;
        deny_out?: Array<string> | null;
        host?: string;
        https_ports?: Array<number> | null;
        no_internet?: boolean;
        private?: boolean;
      };
      pause?: boolean;
      resume?: boolean;
      template?: string;
      timeout_seconds?: number;
      user?: string;
      workdir?: string;
    } | null;
    expires?: string;
    expiry_told?: string;
    gateway?: {
      all_public?: boolean;
      guest_tls?: Array<number> | null;
      host?: string;
      idle_streams?: boolean;
      public_ports?: Array<number> | null;
      tokens?: number;
    };
    keep?: {
      expired_seconds?: number;
      for_seconds?: number;
      last?: number;
    };
    owner?: string;
    persist?: {
      drop?: Array<string> | null;
      max_bytes?: number;
      promote?: Array<{
        path?: string;
        to?: string;
      }> | null;
    };
    purpose?: string;
    rotate?: {
      at?: string;
      every_seconds?: number;
      to?: string;
    };
    tags?: Array<string> | null;
    wake?: {
      at?: string;
      every_seconds?: number;
    };
  };
  spec?: {
    cmdline?: string;
    disk_mib?: number;
    disk_quota_mib?: number;
    hooks?: {
      all_seconds?: number;
      policy?: "" | "require" | "ignore" | "skip";
      timeout_seconds?: number;
    };
    hostname?: string;
    idle?: {
      cpu_percent?: number;
      sleep_seconds?: number;
    };
    image?: string;
    ipv6?: boolean;
    kernel?: string;
    memory_mib?: number;
    name?: string;
    network?: string;
    no_acpi?: boolean;
    /** a network policy: docs/guides/policy.md describes it */
    policy?: Record<string, unknown> | null;
    self?: {
      allow?: Array<string> | null;
    };
    services?: Array<{
      argv?: Array<string> | null;
      backoff_seconds?: number;
      check?: {
        alive_failures?: number;
        exec?: Array<string> | null;
        file?: string;
        http?: string;
        interval_seconds?: number;
        start_seconds?: number;
        tcp?: string;
        timeout_seconds?: number;
        unix?: string;
      } | null;
      dir?: string;
      env?: Array<string> | null;
      log_kib?: number;
      max_backoff_seconds?: number;
      max_restarts?: number;
      name?: string;
      restart?: string;
      stop_seconds?: number;
      stop_signal?: number;
      user?: string;
    }> | null;
    shares?: Array<{
      path?: string;
      source?: string;
      writable?: boolean;
    }> | null;
    tags?: Array<string> | null;
    vcpus?: number;
    volumes?: Array<{
      name?: string;
      path?: string;
      read_only?: boolean;
    }> | null;
  };
};

export type DiffLine = {
  before?: string;
  end?: boolean;
  from?: string;
  gid: number;
  kind?: string;
  mode?: string;
  more?: boolean;
  op?: "added" | "changed" | "removed";
  partial?: string;
  path?: string;
  size: number;
  uid: number;
};

export type Directory = {
  entries: Array<FileInfo> | null;
};

export type Empty = Record<string, never>;

export type EmptyRequest = Record<string, never>;

export type EntryLine = {
  address?: string;
  argv?: Array<string> | null;
  argv_sha256?: string;
  begin?: string;
  by?: {
    boot: string;
    comm: string;
    gid: number;
    login_uid?: number | null;
    parent?: string;
    pid: number;
    ppid: number;
    start: number;
    uid: number;
  } | null;
  detach?: boolean;
  dir?: string;
  elapsed_ms?: number;
  end?: string;
  host_path?: string;
  id?: string;
  kind: string;
  login?: boolean;
  network?: string;
  number?: number;
  outcome?: {
    bytes_in: number;
    bytes_out: number;
    changes?: {
      added?: Array<string> | null;
      changed?: Array<string> | null;
      more?: number;
      partial?: string;
      removed?: Array<string> | null;
    } | null;
    connections?: number;
    cpu_ms?: number;
    error?: string;
    exit?: number | null;
    exit_signal?: number;
    started?: string;
    timed_out?: boolean;
  } | null;
  path?: string;
  process?: string;
  pty?: boolean;
  recursive?: boolean;
  status: string;
  to?: string;
  user?: string;
  via?: string;
};

export type Error = {
  error: {
    code: string;
    field?: string;
    hooks?: Array<{
      event: string;
      name: string;
      output?: string;
      problem: string;
    }> | null;
    host_hooks?: Array<{
      event: string;
      name: string;
      output?: string;
      problem: string;
    }> | null;
    message: string;
    op?: string;
    remedy?: string;
    sandbox?: string;
  };
};

export type EventLine = {
  cause?: string;
  cursor: number;
  details?: {
    after?: number;
    before?: number;
    booted?: string;
    bytes?: number;
    children?: Array<string> | null;
    dropped?: Array<string> | null;
    event?: string;
    expires?: string;
    from?: string;
    hook?: string;
    milliseconds?: number;
    parent?: string;
    path?: string;
    problem?: string;
    reason?: string;
    reset?: boolean;
    snapshot?: string;
    template?: boolean;
  };
  id?: string;
  owner?: string;
  sandbox?: string;
  sandbox_id?: string;
  tags?: Array<string> | null;
  time: string;
  type: string;
  version: number;
};

export type ExecRequest = {
  command?: Array<string> | null;
  cwd?: string;
  env?: Array<string> | null;
  /** base64 */
  stdin?: string;
  timeout_seconds?: number;
  user?: string;
};

export type ExecStartRequest = {
  command?: Array<string> | null;
  cwd?: string;
  detach?: boolean;
  env?: Array<string> | null;
  hold_output?: boolean;
  no_stdin?: boolean;
  output_kib?: number;
  process?: string;
  stdin?: boolean;
  timeout_seconds?: number;
  tty?: {
    cols?: number;
    rows?: number;
    term?: string;
  } | null;
  user?: string;
  window?: number;
};

export type Executed = {
  elapsed_ms: number;
  exit_code: number;
  not_started?: string;
  signal?: number;
  /** base64 */
  stderr: string;
  /** base64 */
  stdout: string;
  timed_out?: boolean;
  truncated?: boolean;
};

export type ExtendRequest = {
  until?: string;
};

export type FileEventLine = {
  dir?: boolean;
  event: "ready" | "created" | "written" | "attributes" | "removed" | "renamed" | "overflow";
  from?: string;
  path?: string;
  problem?: string;
  time: string;
};

export type FileInfo = {
  etag?: string;
  gid: number;
  kind: "file" | "dir" | "symlink" | "fifo" | "socket" | "block" | "char" | "other";
  link?: string;
  mode: string;
  modified: string;
  name: string;
  size: number;
  uid: number;
};

export type FlowRecordLine = Record<string, unknown>;

export type Flows = {
  flows: Array<Record<string, unknown>> | null;
  truncated?: boolean;
};

export type ForkRequest = {
  children?: Array<{
    name?: string;
    tags?: Array<string> | null;
  }> | null;
};

export type Forked = {
  sandboxes: Array<Sandbox> | null;
};

export type Freed = {
  bytes: number;
  cache_files: number;
  layers: number;
  problems?: Array<string> | null;
  snapshots: number;
};

export type GatewayAccess = {
  all_public?: boolean;
  guest_tls?: Array<number> | null;
  host?: string;
  idle_streams?: boolean;
  public_ports?: Array<number> | null;
  token: string;
};

export type Health = {
  checks: Array<{
    name: string;
    ok: boolean;
    problem?: string;
  }> | null;
  ok: boolean;
};

export type History = {
  problems?: Array<string> | null;
  runs: Array<{
    begun: string;
    command: Array<string> | null;
    cpu_seconds?: number;
    ended?: string;
    error?: string;
    exit?: number | null;
    id: string;
    in_bytes: number;
    out_bytes: number;
    signal?: number;
    state: string;
    user?: string;
  }> | null;
  sandbox: Sandbox;
  sleeps: Array<{
    asleep: string;
    awake?: string;
    cpu_seconds: number;
    network_in_bytes: number;
    network_out_bytes: number;
    raw_bytes: number;
    snapshot: string;
    stored_bytes: number;
  }> | null;
  version: number;
};

export type Host = {
  awake_memory_bytes: number;
  awake_memory_most_bytes: number;
  disk_free_bytes: number;
  disk_total_bytes: number;
  memory_available_bytes?: number;
  memory_total_bytes: number;
  problems?: Array<string> | null;
  resolvers: Array<string> | null;
  sandboxes: Record<string, unknown>;
};

export type Image = {
  architecture: string;
  base?: string;
  cmd: Array<string> | null;
  config?: string;
  content: number;
  created: string;
  entrypoint: Array<string> | null;
  env: Array<string> | null;
  exposed_ports?: Array<string> | null;
  id: string;
  include: Array<string> | null;
  inodes: number;
  labels?: Record<string, string>;
  layers?: Array<{
    diff_id: string;
    digest?: string;
    media_type?: string;
    size: number;
  }> | null;
  manifest?: string;
  packages: Array<{
    architecture?: string;
    name: string;
    version: string;
  }> | null;
  passing?: boolean;
  platform?: string;
  size: number;
  skipped: {
    mounts?: number;
    sockets?: number;
    times?: number;
    xattrs?: number;
  };
  source: string;
  spec: string;
  steps?: Array<string> | null;
  stop_signal?: string;
  tagged: string;
  tags: Array<string> | null;
  user: string;
  version: number;
  workdir: string;
};

export type ImageList = {
  images: Array<Image> | null;
  problems?: Array<string> | null;
  version: number;
};

export type ImageRemoved = {
  deleted: boolean;
  id: string;
  untagged: Array<string> | null;
};

export type Imported = {
  base?: string;
  created: string;
  depth: number;
  dropped: Array<string> | null;
  exclusive_bytes: number;
  id: string;
  kept?: boolean;
  kind: string;
  note?: string;
  problem?: string;
  ram_bytes: number;
  stored_bytes: number;
  tags?: Array<string> | null;
  vm: string;
  vm_id?: string;
};

export type Is = {
  api: number;
  owner?: string;
  scope: "read" | "write";
  scopes: Array<string> | null;
  version: string;
};

export type List = {
  next?: string;
  problems?: Array<string> | null;
  sandboxes: Array<Sandbox> | null;
  version: number;
};

export type MakeVolumeRequest = {
  name?: string;
  size_mib?: number;
};

export type MigrateRequest = {
  hooks?: "" | "require" | "ignore" | "skip";
  to?: string;
};

export type MigrateResult = {
  asleep?: boolean;
  bytes_ahead: number;
  bytes_pause: number;
  downtime_ms: number;
  from: string;
  name: string;
  problem?: string;
  snapshot: string;
  stages_ms: Record<string, number>;
  to: string;
};

export type MkdirRequest = {
  mode?: string;
  parents?: boolean;
  path?: string;
};

export type MoveRequest = {
  from?: string;
  to?: string;
};

export type Moved = {
  bytes: number;
};

export type NetEventLine = {
  bytes: number;
  direction: "" | "egress" | "ingress";
  ethertype: number;
  /** an IP address, or empty */
  guest: string;
  guest_port?: number;
  host?: string;
  lost?: number;
  name?: string;
  /** an IP address, or empty */
  peer?: string;
  peer_port?: number;
  protocol?: string;
  /** why a packet passed or did not */
  reason: string;
  rule?: string;
  secret?: string;
  server_name?: string;
  status?: number;
  suppressed?: number;
  time: string;
  verdict: "" | "allow" | "deny";
};

export type NetworkStats = {
  /** an IP address, or empty */
  address: string;
  /** an IP address, or empty */
  address6?: string;
  counters: Array<{
    bytes: number;
    direction: "" | "egress" | "ingress";
    packets: number;
    /** why a packet passed or did not */
    reason: string;
    verdict: "" | "allow" | "deny";
  }> | null;
  dns: {
    answered: number;
    dropped: number;
    failed: number;
    rebound: number;
    refused: number;
  };
  egress: {
    bytes: number;
    idle: number;
  };
  ingress: {
    bytes: number;
    idle: number;
  };
  name: string;
  process: {
    cpu_seconds: number;
    failed: number;
    refused: number;
    starts: number;
  };
  proxy?: {
    busy: number;
    cut: number;
    injected: number;
    open: number;
    refused: number;
    requests: number;
    tunnels: number;
  } | null;
  tap: string;
  tls: {
    cut: number;
    failed: number;
    open: number;
    passed: number;
    refused: number;
  };
  warnings?: Array<string> | null;
};

export type Object = Record<string, unknown>;

export type Operation = {
  begun: string;
  done: number;
  ended?: string | null;
  error?: {
    code: string;
    field?: string;
    hooks?: Array<{
      event: string;
      name: string;
      output?: string;
      problem: string;
    }> | null;
    host_hooks?: Array<{
      event: string;
      name: string;
      output?: string;
      problem: string;
    }> | null;
    message: string;
    op?: string;
    remedy?: string;
    sandbox?: string;
  } | null;
  id: string;
  image?: string;
  kind: string;
  stage?: string;
  state: "running" | "done" | "failed" | "canceled";
  template?: string;
  total: number;
};

export type Operations = {
  operations: Array<Operation> | null;
};

export type Policy = {
  /** Verdicts where no rule matches; they open public addresses alone. */
  default?: {
    egress?: "allow" | "deny" | "reject" | "" | null;
    ingress?: "allow" | "deny" | "reject" | "" | null;
  } | null;
  dns?: {
    queries_per_second?: number;
    upstreams?: Array<string> | null;
  } | null;
  flows?: number;
  limits?: {
    egress?: {
      bits?: {
        burst?: number;
        per_second: number;
      } | null;
      connections?: {
        burst?: number;
        per_second: number;
      } | null;
      packets?: {
        burst?: number;
        per_second: number;
      } | null;
    } | null;
    ingress?: {
      bits?: {
        burst?: number;
        per_second: number;
      } | null;
      connections?: {
        burst?: number;
        per_second: number;
      } | null;
      packets?: {
        burst?: number;
        per_second: number;
      } | null;
    } | null;
  } | null;
  /** An HTTP proxy for the VM on its gateway, which can put secrets into its requests. */
  proxy?: {
    /** Without it there is none. */
    enabled?: boolean | null;
    inject?: Array<{
      header: string;
      /** Names that a rule has as well; no patterns. */
      hosts: Array<string>;
      /** Left out, it is 443. */
      ports?: Array<number | string> | null;
      /** What stands before the secret in the header, such as "Bearer ". */
      prefix?: string | null;
      /** The name of the secret, and of the variable in the VM. */
      secret: string;
    }> | null;
  } | null;
  publish?: Array<{
    listen: string;
    port: number;
    protocol: "tcp" | "udp";
  }> | null;
  quota?: {
    egress_bytes?: number | null;
    ingress_bytes?: number | null;
  } | null;
  /** In order: the first that matches decides. */
  rules?: Array<{
    agents?: Array<string> | null;
    cidrs?: Array<string> | null;
    direction: "egress" | "ingress";
    groups?: Array<"any" | "public" | "private" | "host" | "metadata" | "link-local" | "loopback" | "multicast"> | null;
    name?: string;
    names?: Array<string> | null;
    ports?: Array<number | string> | null;
    protocols?: Array<"tcp" | "udp" | "icmp" | "any"> | null;
    /** Ports at which names have to be the server name of TLS as well, or none alone. Left out, it is 443. */
    tls?: Array<number | string> | null;
    verdict?: "allow" | "deny" | "reject" | "" | null;
  }> | null;
  version?: 1;
} | null;

export type PolicyRequest = {
  /** Verdicts where no rule matches; they open public addresses alone. */
  default?: {
    egress?: "allow" | "deny" | "reject" | "" | null;
    ingress?: "allow" | "deny" | "reject" | "" | null;
  } | null;
  dns?: {
    queries_per_second?: number;
    upstreams?: Array<string> | null;
  } | null;
  flows?: number;
  limits?: {
    egress?: {
      bits?: {
        burst?: number;
        per_second: number;
      } | null;
      connections?: {
        burst?: number;
        per_second: number;
      } | null;
      packets?: {
        burst?: number;
        per_second: number;
      } | null;
    } | null;
    ingress?: {
      bits?: {
        burst?: number;
        per_second: number;
      } | null;
      connections?: {
        burst?: number;
        per_second: number;
      } | null;
      packets?: {
        burst?: number;
        per_second: number;
      } | null;
    } | null;
  } | null;
  /** An HTTP proxy for the VM on its gateway, which can put secrets into its requests. */
  proxy?: {
    /** Without it there is none. */
    enabled?: boolean | null;
    inject?: Array<{
      header: string;
      /** Names that a rule has as well; no patterns. */
      hosts: Array<string>;
      /** Left out, it is 443. */
      ports?: Array<number | string> | null;
      /** What stands before the secret in the header, such as "Bearer ". */
      prefix?: string | null;
      /** The name of the secret, and of the variable in the VM. */
      secret: string;
    }> | null;
  } | null;
  publish?: Array<{
    listen: string;
    port: number;
    protocol: "tcp" | "udp";
  }> | null;
  quota?: {
    egress_bytes?: number | null;
    ingress_bytes?: number | null;
  } | null;
  /** In order: the first that matches decides. */
  rules?: Array<{
    agents?: Array<string> | null;
    cidrs?: Array<string> | null;
    direction: "egress" | "ingress";
    groups?: Array<"any" | "public" | "private" | "host" | "metadata" | "link-local" | "loopback" | "multicast"> | null;
    name?: string;
    names?: Array<string> | null;
    ports?: Array<number | string> | null;
    protocols?: Array<"tcp" | "udp" | "icmp" | "any"> | null;
    /** Ports at which names have to be the server name of TLS as well, or none alone. Left out, it is 443. */
    tls?: Array<number | string> | null;
    verdict?: "allow" | "deny" | "reject" | "" | null;
  }> | null;
  version?: 1;
} | null;

export type PolicyResult = {
  live: boolean;
  name: string;
  network?: {
    /** an IP address, or empty */
    address: string;
    /** an IP address, or empty */
    address6?: string;
    tap: string;
    warnings?: Array<string> | null;
  } | null;
};

export type Processes = {
  processes: Array<{
    attached: boolean;
    command: Array<string> | null;
    detached: boolean;
    exit?: {
      cpu_ms?: number;
      exit_code: number;
      not_started?: string;
      signal?: number;
      timed_out?: boolean;
    } | null;
    output_end: number;
    output_start: number;
    pid: number;
    process: string;
    started: string;
    tty?: boolean;
  }> | null;
};

export type Promoted = {
  promoted: Array<{
    at: string;
    bytes: number;
    entries: number;
    path: string;
    skipped?: Array<string> | null;
    skipped_count?: number;
  }> | null;
};

export type PruneRequest = {
  dry_run?: boolean;
};

export type Pruned = {
  abandoned?: Array<{
    bytes?: number;
    id: string;
    name?: string;
    why: string;
  }> | null;
  bytes: number;
  cache_files: number;
  dry_run?: boolean;
  histories: number;
  layers: number;
  problems?: Array<string> | null;
  remove: Array<{
    bytes?: number;
    id: string;
    name?: string;
    why: string;
  }> | null;
  sleep: Array<{
    bytes?: number;
    id: string;
    name?: string;
    why: string;
  }> | null;
};

export type PullRequest = {
  from?: string;
  include?: Array<string> | null;
  no_cache?: boolean;
  platform?: string;
  tag?: string;
};

export type RenameRequest = {
  to?: string;
};

export type ResizeVolumeRequest = {
  size_mib?: number;
};

export type RestoreRequest = {
  snapshot?: string;
};

export type Sandbox = {
  class: "" | "ephemeral" | "resumable" | "workspace";
  confined?: boolean;
  created: string;
  disk_mib: number;
  exit?: string;
  expires?: string;
  fork_point?: string;
  generation?: number;
  hooks?: string;
  host?: string;
  id: string;
  idle_seconds?: number;
  image: string;
  image_id?: string;
  keep?: {
    expired_seconds?: number;
    for_seconds?: number;
    last?: number;
  };
  kernel?: string;
  memory_mib: number;
  name: string;
  network: string;
  next_wake?: string;
  owner?: string;
  parent?: string;
  parent_id?: string;
  persist?: {
    drop?: Array<string> | null;
    max_bytes?: number;
    promote?: Array<{
      path: string;
      to: string;
    }> | null;
  };
  policy_sha256?: string;
  problem?: string;
  purpose?: string;
  removed?: string;
  snapshot?: string;
  status: "creating" | "running" | "waiting" | "asleep" | "stopped" | "crashed" | "failed" | "expired";
  tags: Array<string> | null;
  vcpus: number;
};

export type SecretSources = {
  sources: Array<{
    all_owners?: boolean;
    kind: "file" | "command" | "env" | "credential";
    name: string;
    owners?: Array<string> | null;
  }> | null;
};

export type Secrets = {
  secrets: Array<{
    from?: string;
    gid?: number;
    kept: boolean;
    mode?: number;
    name: string;
    present: boolean;
    proxy?: boolean;
    size: number;
    uid?: number;
  }> | null;
};

export type Service = {
  argv: Array<string> | null;
  backoff_seconds?: number;
  check?: {
    alive_failures?: number;
    exec?: Array<string> | null;
    file?: string;
    http?: string;
    interval_seconds?: number;
    start_seconds?: number;
    tcp?: string;
    timeout_seconds?: number;
    unix?: string;
  } | null;
  check_problem?: string;
  check_restarts?: number;
  dir?: string;
  ended?: string | null;
  env?: Array<string> | null;
  exit_code?: number | null;
  log_kib?: number;
  max_backoff_seconds?: number;
  max_restarts?: number;
  name: string;
  pid?: number;
  problem?: string;
  ready: boolean;
  ready_at?: string | null;
  restart?: string;
  restarts: number;
  started?: string | null;
  state?: string;
  stop_seconds?: number;
  stop_signal?: number;
  user?: string;
};

export type Services = {
  services: Array<Service> | null;
};

export type SetSecretRequest = {
  from?: string;
  gid?: number;
  mode?: number;
  proxy?: boolean;
  transient?: boolean;
  uid?: number;
  /** base64 */
  value?: string;
};

export type SetServiceRequest = {
  argv?: Array<string> | null;
  backoff_seconds?: number;
  check?: {
    alive_failures?: number;
    exec?: Array<string> | null;
    file?: string;
    http?: string;
    interval_seconds?: number;
    start_seconds?: number;
    tcp?: string;
    timeout_seconds?: number;
    unix?: string;
  } | null;
  dir?: string;
  env?: Array<string> | null;
  image_config?: boolean;
  log_kib?: number;
  max_backoff_seconds?: number;
  max_restarts?: number;
  name?: string;
  restart?: string;
  stop_seconds?: number;
  stop_signal?: number;
  user?: string;
};

export type SignalRequest = {
  signal?: number;
};

export type SleepRequest = {
  durable?: boolean;
  hooks?: "" | "require" | "ignore" | "skip";
};

export type SleepResult = {
  asleep?: string;
  awake?: string;
  bytes_raw: number;
  bytes_shared: number;
  bytes_stored: number;
  cpu_seconds?: number;
  faults: number;
  hooks?: Array<{
    event: string;
    name: string;
    output?: string;
    problem: string;
  }> | null;
  host_hooks?: Array<{
    event: string;
    name: string;
    output?: string;
    problem: string;
  }> | null;
  mib_touched: number;
  name: string;
  network_in_bytes?: number;
  network_out_bytes?: number;
  pages_changed: number;
  pages_free: number;
  persist?: {
    disk_bytes?: number;
    dropped?: Array<{
      bytes: number;
      entries: number;
      kept?: number;
      mounts?: number;
      path: string;
    }> | null;
    problems?: Array<string> | null;
    promoted?: Array<{
      at: string;
      bytes: number;
      entries: number;
      path: string;
      skipped?: Array<string> | null;
      skipped_count?: number;
    }> | null;
  } | null;
  problem?: string;
  snapshot: string;
  stages_ms: Record<string, number>;
};

export type SnapshotInfo = {
  base?: string;
  created: string;
  depth: number;
  exclusive_bytes: number;
  id: string;
  kept?: boolean;
  kind: string;
  note?: string;
  problem?: string;
  ram_bytes: number;
  stored_bytes: number;
  tags?: Array<string> | null;
  vm: string;
  vm_id?: string;
};

export type SnapshotRequest = {
  disk_only?: boolean;
  hooks?: "" | "require" | "ignore" | "skip";
  note?: string;
};

export type Snapshots = {
  snapshots: Array<SnapshotInfo> | null;
  version: number;
};

export type Started = {
  pid: number;
  process: string;
};

export type Stats = {
  /** what the guest says of its use, with the fields of the Go type guest.Stats */
  guest?: Record<string, unknown> | null;
  host: {
    awake_ms: number;
    confined: boolean;
    cpu_system_ms: number;
    cpu_throttled_ms: number;
    cpu_user_ms: number;
    disk_quota: number;
    disk_read: number;
    disk_used: number;
    disk_written: number;
    faults: number;
    hung: boolean;
    memory_private: number;
    memory_shared: number;
    memory_swapped: number;
    mib_touched: number;
    pid: number;
  };
  name: string;
  problem?: string;
  time: string;
};

export type StopRequest = {
  kill?: boolean;
  timeout_seconds?: number;
};

export type TagsRequest = {
  tags?: Array<string> | null;
};

export type Template = {
  cmdline?: string;
  created?: string | null;
  disk_mib?: number;
  image: string;
  ipv6?: boolean;
  kernel?: string;
  key: string;
  memory_mib?: number;
  network?: string;
  no_acpi?: boolean;
  problem?: string;
  snapshot?: string;
  state: "ready" | "wanted" | "failed";
  stored_bytes: number;
  used: string;
  vcpus?: number;
};

export type TemplateSpecRequest = {
  cmdline?: string;
  disk_mib?: number;
  image?: string;
  ipv6?: boolean;
  kernel?: string;
  memory_mib?: number;
  network?: string;
  no_acpi?: boolean;
  vcpus?: number;
};

export type Templates = {
  problems?: Array<string> | null;
  templates: Array<Template> | null;
};

export type Volume = {
  allocated_bytes: number;
  created: string;
  generation: number;
  id: string;
  name: string;
  settled?: {
    snapshot: string;
    vm: string;
  } | null;
  size_bytes: number;
  used_by: Array<string> | null;
  users: Array<{
    path: string;
    phase: string;
    read_only: boolean;
    vm: string;
  }> | null;
};

export type Volumes = {
  volumes: Array<Volume> | null;
};
