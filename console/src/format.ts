// Numbers, sizes and times as people read them.

const whole = new Intl.NumberFormat("en");

export const count = (value: number): string => whole.format(Math.round(value));

export function bytes(value: number): string {
  const units = ["B", "kB", "MB", "GB", "TB"];
  let unit = 0;
  while (value >= 1000 && unit < units.length - 1) {
    value /= 1000;
    unit += 1;
  }
  return `${value >= 100 || unit === 0 ? Math.round(value) : value.toFixed(1)} ${units[unit]}`;
}

export function seconds(value: number): string {
  if (value < 1) return `${Math.round(value * 1000)} ms`;
  if (value < 60) return `${value.toFixed(value < 10 ? 1 : 0)} s`;
  if (value < 3600) return `${Math.floor(value / 60)} min ${Math.round(value % 60)} s`;
  return `${Math.floor(value / 3600)} h ${Math.round((value % 3600) / 60)} min`;
}

/** How long ago, or in how long, a time of the server (seconds since 1970) is. */
export function distance(time: number): string {
  const far = Math.abs(Date.now() / 1000 - time);
  const text = far < 60 ? `${Math.round(far)} s` : far < 3600 ? `${Math.round(far / 60)} min`
    : far < 172800 ? `${Math.round(far / 3600)} h` : `${Math.round(far / 86400)} days`;
  return time * 1000 < Date.now() ? `${text} ago` : `in ${text}`;
}

export const clock = (time: number): string => new Date(time * 1000).toLocaleTimeString("en-GB");

export const percent = (share: number): string => `${(100 * share).toFixed(share < 0.1 ? 1 : 0)} %`;

/** Shows control characters that change how text around them is displayed. */
export const visible = (text: string): string =>
  text
    .replace(/\u001b\[[0-9;?]*[ -/]*[@-~]/g, "")
    .replace(/[\u0000-\u0008\u000b\u000c\u000e-\u001f\u007f-\u009f]/g, "\ufffd")
    .replace(/[\u200e\u200f\u202a-\u202e\u2066-\u2069]/g, "\ufffd");
